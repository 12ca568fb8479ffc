"""Where the parts of a model lie: in a folder of parts, or in what a project's instructions leave.

A folder of parts has `transformer/`, `vae/` and `text_encoder/`. In any other, parts are told by
their tensors (`recognition`), and the family says which of several transformers is streamed.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from scope_contracts.errors import UserInputError, shown
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.family import Family, family_names
from scope_rt.models.file_contents import model_files
from scope_rt.models.folder_level import LEVELS, WAN_MODELS, check_level, holds_model
from scope_rt.models.found_parts import FoundPart, folder_of, is_lora
from scope_rt.models.recipe import RECIPE_NAME, Recipe
from scope_rt.models.recognition import Recognised, class_family, recognised
from scope_rt.models.weight_files import WeightFiles
from scope_rt.tensor_files.config_file import read_config
from scope_rt.tensor_files.listing import listing_of
from scope_rt.tensor_files.state_dict import SAFETENSORS, TORCH

_PARTS = ("transformer", "vae", "text_encoder", "tokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model's parts, found and told apart; nothing but headers and JSON has been read."""

    root: Path
    """The folder in which all of them lie."""
    family: Family
    config: CausalWanConfig
    weights: WeightFiles
    state_dict: str
    """The key under which the weights stand in their file; "" where the file is the state dict."""
    lora: FoundPart | None
    """That is merged into the weights."""
    config_path: Path
    """Of the transformer's sizes."""
    vae: Path
    """A folder with a `config.json`, or Wan's own file."""
    text_encoder: Path
    """The same."""
    places: tuple[Path, ...]
    """Files, and folders with all that is in them, that what is computed follows from."""
    looks_like: tuple[str, ...] = ()
    """Families whose projects publish such files, where the family that was asked for is of
    another project."""

    @classmethod
    def of(cls, folder: Path, recipe: str | None) -> Self:
        """Find the parts in `folder`, or around the file that has the transformer.

        Args:
            recipe: the name of a family or its TOML file; where None, files tell it.

        Raises:
            UserInputError: a part is missing or unknown, files tell no family, several, or
                another one than `recipe`, or the model lies in another folder.
        """
        if folder.is_file():
            root = folder_around(folder)
            return cls._of_project(root, recipe, folder.relative_to(root).as_posix())
        if (folder / "transformer").is_dir() or (folder / RECIPE_NAME).exists():
            return cls._of_parts(folder, recipe)
        try:
            layout = cls._of_project(folder, recipe)
        except UserInputError:
            check_level(folder)
            raise
        inner = Path(os.path.commonpath(layout.places))
        if inner != folder and holds_model(inner):  # and may have its project's configuration
            raise UserInputError(f"the model in {folder} lies in {inner}: give that folder")
        return layout

    @classmethod
    def _of_parts(cls, folder: Path, recipe: str | None) -> Self:
        transformer, own = folder / "transformer", folder / RECIPE_NAME
        _check_no_lora(folder)
        config = CausalWanConfig.from_folder(transformer)
        weights = WeightFiles.open(transformer)
        if recipe is not None:
            family = Family.named(recipe).in_folder(folder)
            if family.lora is not None:
                raise UserInputError(
                    f"{folder}: recipe {recipe} merges a LoRA, and none can be told in a folder of "
                    "parts; give the project's own files, or a .toml file without [lora] for "
                    "weights that have it in them"
                )
            _check_folder_agrees(family, _told_by_parts(folder))
        elif own.exists():
            family = Family(name=RECIPE_NAME, recipe=Recipe.from_folder(folder))
        else:
            family = _family_of_class(folder, transformer / "config.json")
        # Whoever has a recipe of his own may have parts of his own, and these files of any name.
        parts = [folder] if own.exists() else [folder / part for part in _PARTS]
        return cls(
            root=folder,
            family=family,
            config=config,
            weights=weights,
            state_dict="",
            lora=None,
            config_path=transformer / "config.json",
            vae=folder / "vae",
            text_encoder=folder / "text_encoder",
            places=tuple(part for part in parts if part.is_dir()),
        )

    @classmethod
    def _of_project(cls, folder: Path, recipe: str | None, only: str | None = None) -> Self:
        listing = listing_of(folder)
        found = recognised(listing, only)
        if recipe is None:
            if found.problems and (listing.unreadable or not found.transformers):
                raise UserInputError(found.problems[0])
            families = _with_config(folder, found.families)
            family = _only_family(folder, families, found.transformers)
        else:
            family = Family.named(recipe)
        family = family.in_folder(folder)
        transformer, lora = _transformer(folder, found, family), _lora(folder, found, family)
        if only is None:  # else the configuration may be of another file
            _check_folder_agrees(family, _told_by_config(folder), transformers=found.transformers)
        if found.problems:
            raise UserInputError(found.problems[0])
        config_path, config = _config(listing.root, listing.configs, transformer)
        tokenizer = folder / found.tokenizers[0]
        text_encoder = folder / _first(found.text_encoders)
        return cls(
            root=folder,
            family=family,
            config=config,
            weights=WeightFiles.of_state_dict(
                [folder / file for file in transformer.files], transformer.key
            ),
            state_dict=transformer.key,
            lora=lora,
            config_path=config_path,
            vae=folder / _first(found.vaes),
            text_encoder=text_encoder,
            places=(
                *(folder / file for file in transformer.files),
                *(folder / file for file in (lora.files if lora is not None else ())),
                config_path,
                folder / _first(found.vaes),
                text_encoder,
                tokenizer,
                *family.sources,
            ),
            looks_like=() if family.is_in(found.families) else found.families,
        )

    def with_recipe(self, fingerprint: str) -> str:
        """The fingerprint of the files and of a recipe that is none of them."""
        if not self.family.is_chosen:
            return fingerprint
        return hashlib.sha256(f"{fingerprint} {self.recipe_digest}".encode()).hexdigest()

    @property
    def recipe_digest(self) -> str:
        """SHA-256 over what the family says, wherever that stands."""
        family = self.family
        values = [
            family.lora and asdict(family.lora),
            asdict(family.recipe),
            self.state_dict,
        ]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def weights_by_file(self) -> dict[str, dict[str, str]]:
        """The diffusers name of each weight, by its file and by what it is known by there."""
        key = f"{self.state_dict}/" if self.state_dict else ""
        return {
            path.relative_to(self.root).as_posix(): {
                f"{key}{each.name}": name for name, each in tensors
            }
            for path, tensors in self.weights.by_file()
        }

    def files(self) -> Iterator[Path]:
        """All files that what is computed follows from."""
        for place in self.places:
            yield from [place] if place.is_file() else model_files(place)


def _check_no_lora(folder: Path) -> None:
    """Refuse one beside the parts, as diffusers saves it: no recipe of parts merges any.

    Raises:
        UserInputError: naming its file.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix not in (SAFETENSORS, *TORCH) or not path.is_file():
            continue
        if any(map(is_lora, listing_of(path).states)):
            raise UserInputError(
                f"{path} is a LoRA, which would be left out of a folder of parts; merge it into "
                "transformer/ with diffusers, or move the file out of the folder"
            )


def folder_around(file: Path) -> Path:
    """Where the other parts lie, as the projects' instructions have it. Raises UserInputError."""
    for folder in file.resolve().parents[:LEVELS]:
        if (folder / WAN_MODELS).is_dir():
            return folder
    raise UserInputError(
        f"{file} is a transformer at most, and no folder around it has {WAN_MODELS}/ with VAE and "
        "text encoder; give a folder that has all"
    )


def _family_of_class(folder: Path, config: Path) -> Family:
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


def _told_by_parts(folder: Path) -> dict[str, Path]:
    """The family that a folder of parts tells, by the file that does."""
    if (own := folder / RECIPE_NAME).exists():
        return {RECIPE_NAME: own}
    config = folder / "transformer" / "config.json"
    said = read_config(config, fix="copy the folder again").get("_class_name")
    return dict.fromkeys(class_family(said), config)


def _told_by_config(folder: Path) -> dict[str, Path]:
    """The families whose project's own configuration lies there, by that file."""
    return {name: path for name in family_names() if (path := _config_of(folder, name))}


def _check_folder_agrees(
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
    usable = [name for name in told if transformers is None or _takes_any(name, transformers)]
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


def _with_config(folder: Path, families: Sequence[str]) -> Sequence[str]:
    """Of several families, that whose project's own configuration lies there."""
    there = [name for name in families if _config_of(folder, name)]
    return there if len(there) == 1 else families


def _config_of(folder: Path, family: str) -> Path | None:
    """The project's own configuration, if it lies there."""
    project = Family.named(family).project
    path = None if project is None else folder / project.files[-1]
    return path if path is not None and path.is_file() else None


def _only_family(where: Path, families: Sequence[str], transformers: Sequence[FoundPart]) -> Family:
    """Raises UserInputError where files tell no family, or several."""
    if len(families) == 1:
        return Family.named(families[0])
    what = where / str(transformers[0])
    near = [*_told_by_config(where)] if families else []
    names = dict.fromkeys([*families, *near] or family_names())
    choices = "; ".join(_in_words(name, transformers) for name in names)
    said = "may be of several families" if families else "tells no family"
    raise UserInputError(
        f"{what} {said} of checkpoints; name one with --recipe, or give a .toml file of your own: "
        f"{choices}"
    )


def _in_words(name: str, transformers: Sequence[FoundPart]) -> str:
    """A family, and what it takes that is not there."""
    keys = Family.named(name).weights.state_dicts
    if "" in keys or _takes_any(name, transformers):
        return name
    return f"{name} (takes {' or '.join(map(repr, keys))}, which is not there)"


def _takes_any(name: str, transformers: Sequence[FoundPart]) -> bool:
    keys = Family.named(name).weights.state_dicts
    return any(part.key in keys for part in transformers)


def _transformer(folder: Path, found: Recognised, family: Family) -> FoundPart:
    """The one that the family streams. Raises UserInputError where it is not there."""
    keys = family.weights.state_dicts
    fitting = [part for part in found.transformers if part.key in keys]
    if len(fitting) == 1:
        return fitting[0]
    if len(fitting) > 1:
        names = ", ".join(map(str, fitting))
        raise UserInputError(
            f"{folder} has several transformers that {family.name} could take: {names}; name its "
            "file in place of the folder"
        )
    if not found.transformers and found.problems:
        raise UserInputError(found.problems[0])
    have = ", ".join(str(folder / str(part)) for part in found.transformers)
    want = " or ".join(f"{key!r} of a .pt" if key else "a file of one state dict" for key in keys)
    told = _told_by_config(folder)
    others = [
        name
        for name in told or found.families or family_names()
        if _takes_any(name, found.transformers)
    ]
    fix = f", or name another family with --recipe ({', '.join(others)})" if others else ""
    raise UserInputError(
        f"{have}: recipe {family.name} takes {want}; copy the project's own file{fix}"
    )


def _lora(folder: Path, found: Recognised, family: Family) -> FoundPart | None:
    """The LoRA that the family takes.

    Raises:
        UserInputError: it is not there, or there is one that would be left out.
    """
    if family.lora is None:
        if found.loras:
            raise UserInputError(
                f"{folder / str(found.loras[0])}: recipe {family.name} would leave this LoRA out; "
                "name another family with --recipe, or move the file out of the folder"
            )
        return None
    fitting = [part for part in found.loras if part.key in (family.lora.state_dict, "")]
    if not fitting and found.problems:
        raise UserInputError(found.problems[0])
    if len(fitting) != 1:
        have = ", ".join(str(folder / file) for file in found.lora_files) or str(folder)
        raise UserInputError(
            f"{have}: recipe {family.name} takes one LoRA, {family.lora.state_dict!r} of a .pt, "
            f"and there are {len(fitting)}; copy the project's own file"
        )
    return fitting[0]


def _config(
    root: Path, configs: Mapping[str, Mapping[str, object]], transformer: FoundPart
) -> tuple[Path, CausalWanConfig]:
    """The sizes of an original transformer, from the `config.json` that has its width and depth."""
    places = [name for name, raw in configs.items() if raw.get("_class_name") == "WanModel"]
    if not places:
        raise UserInputError(
            f"{root}: no config.json of class WanModel, which says how many heads {transformer} "
            "has; add that of its Wan folder"
        )
    sizes = (transformer.width, transformer.num_blocks)
    for name in places:
        if (configs[name].get("dim"), configs[name].get("num_layers")) == sizes:
            path = root / name
            return path, CausalWanConfig.from_original(path, text_dim=transformer.text_width)
    said = "; ".join(
        f"{root / name}: dim {configs[name].get('dim')}, num_layers "
        f"{configs[name].get('num_layers')}"
        for name in places
    )
    raise UserInputError(
        f"{said}; want {sizes[0]} and {sizes[1]}, as {transformer} has; add the config.json of its "
        "Wan folder"
    )


def _first(parts: Sequence[FoundPart]) -> str:
    """The file of a part, or the folder of one that diffusers wrote; of the same in two formats,
    that of safetensors."""
    part = min(parts, key=lambda each: not each.files[0].endswith(".safetensors"))
    return part.files[0] if part.naming == "original" else folder_of(part.files[0])
