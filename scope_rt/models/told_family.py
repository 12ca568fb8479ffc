"""Which family a folder's own files tell: by the form of its weights, and by its project's YAML.

Files that contradict each other decide nothing: a person says which of them is meant.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from scope_contracts.errors import UserInputError, shown
from scope_rt.models.family import Family, family_names
from scope_rt.models.found_parts import FoundPart
from scope_rt.models.recipe import RECIPE_NAME
from scope_rt.models.recognition import Recognised, class_family
from scope_rt.tensor_files.config_file import read_config


def told_family(folder: Path, found: Recognised) -> Family:
    """The one that the files of a project's folder tell.

    Of several variants of one project, its own configuration says which is meant.

    Raises:
        UserInputError: they tell none, or several.
    """
    there = told_by_config(folder)
    told = [name for name in there if takes_any(name, found.transformers)]
    if not told:
        return _only_family(folder, found.families, found)
    families, first = [name for name in told if name in found.families], Family.named(told[0])
    if other := next((name for name in told if not first.is_in([name])), None):
        raise UserInputError(
            f"{there[told[0]]} is of recipe {told[0]}, and {there[other]} of recipe {other}; name "
            "the one that these weights are of with --recipe, or move the other file away"
        )
    lacks_lora = first.lora is not None and not found.lora_files
    if not families and lacks_lora:
        return first  # which then asks for it
    if not families and first.is_in(found.families):
        # Variants that share a file are taken by name alone, but for the first of them.
        families = list({there[name]: name for name in reversed(told)}.values())[::-1]
    return _only_family(folder, families or found.families, found)


def _only_family(where: Path, families: Sequence[str], found: Recognised) -> Family:
    """Raises UserInputError where files tell no family, or several."""
    if len(families) == 1:
        return Family.named(families[0])
    what = where / str(found.transformers[0])
    near = [*found.with_lora, *told_by_config(where)] if families else []
    names = dict.fromkeys([*families, *near] or family_names())
    choices = "; ".join(_in_words(name, found) for name in names)
    said = "may be of several families" if families else "tells no family"
    raise UserInputError(
        f"{what} {said} of checkpoints; name one with --recipe, or give a .toml file of your own: "
        f"{choices}"
    )


def _in_words(name: str, found: Recognised) -> str:
    """A family, and what it takes that is not there."""
    family = Family.named(name)
    keys, lacks = family.weights.state_dicts, []
    if "" not in keys and not takes_any(name, found.transformers):
        lacks += [" or ".join(map(repr, keys))]
    if family.lora is not None and not found.loras:
        lacks += [f"the LoRA {family.lora.state_dict!r}"]
    return f"{name} (takes {' and '.join(lacks)}, which is not there)" if lacks else name


def takes_any(name: str, transformers: Sequence[FoundPart]) -> bool:
    """Whether one of the package's families could stream one of `transformers`."""
    keys = Family.named(name).weights.state_dicts
    return any(part.key in keys for part in transformers)


def told_by_config(folder: Path) -> dict[str, Path]:
    """The families whose project's own configuration lies there, by that file."""
    return {name: path for name in family_names() if (path := _config_of(folder, name))}


def _config_of(folder: Path, family: str) -> Path | None:
    """The project's own configuration, if it lies there."""
    project = Family.named(family).project
    path = None if project is None else folder / project.files[-1]
    return path if path is not None and path.is_file() else None


def family_of_class(folder: Path, config: Path) -> Family:
    """Of a folder of parts without a recipe of its own. Raises UserInputError."""
    said = read_config(config, fix="copy the folder again").get("_class_name")
    if families := class_family(said):
        return Family.named(families[0])
    raise UserInputError(
        f"model folder {folder} has no {RECIPE_NAME}, which says how its model is sampled, and "
        f"class {shown(said)} of {config} does not; name a family with --recipe "
        f"({', '.join(family_names())}, or a .toml file), or write it, by "
        "runbooks/guides/your-own-model.md (scope-rt runbook your-own-model)"
    )


def told_by_parts(folder: Path) -> dict[str, Path]:
    """The family that a folder of parts tells, by the file that does."""
    if (own := folder / RECIPE_NAME).exists():
        return {RECIPE_NAME: own}
    config = folder / "transformer" / "config.json"
    said = read_config(config, fix="copy the folder again").get("_class_name")
    return dict.fromkeys(class_family(said), config)


def check_folder_agrees(
    family: Family, told: Mapping[str, Path], *, transformers: Sequence[FoundPart] | None = None
) -> None:
    """Refuse a family of the package where the folder's own words are another's.

    A file of a person's own is that person's word, and comes before. A family that takes none of
    the `transformers` is not advised.

    Raises:
        UserInputError: naming the file that says otherwise.
    """
    if family.name in told or not told or family.name not in family_names():
        return
    usable = [name for name in told if transformers is None or takes_any(name, transformers)]
    name = next(iter(usable or told))
    path = told[name]
    said, fix = f"of recipe {name}", f"take --recipe {name}"
    if not usable:
        fix = f"copy the weights that {name}'s project publishes, or move {path.name} away"
    if name == RECIPE_NAME:
        said, fix = "the recipe of these weights", "leave --recipe out"
    raise UserInputError(
        f"{path} is {said}; with {family.name} the video may be wrong without looking so: {fix}, "
        f"or, if you know better, give a file of your own (scope-rt model recipes {family.name} > "
        "mine.toml, then --recipe mine.toml)"
    )
