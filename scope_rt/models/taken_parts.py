"""Which of the parts that lie there a family takes: its transformer, its LoRA, its sizes."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.family import Family, family_names
from scope_rt.models.found_parts import FoundPart, folder_of, is_lora
from scope_rt.models.recognition import Recognised
from scope_rt.models.told_family import takes_any, told_by_config
from scope_rt.tensor_files.listing import listing_of
from scope_rt.tensor_files.state_dict import SAFETENSORS, TORCH


def transformer_of(folder: Path, found: Recognised, family: Family) -> FoundPart:
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
    told = told_by_config(folder)
    others = [
        name
        for name in told or found.families or family_names()
        if takes_any(name, found.transformers)
    ]
    fix = f", or name another family with --recipe ({', '.join(others)})" if others else ""
    raise UserInputError(
        f"{have}: recipe {family.name} takes {want}; copy the project's own file{fix}"
    )


def lora_of(folder: Path, found: Recognised, family: Family) -> FoundPart | None:
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
    if not found.lora_files:
        raise UserInputError(
            f"{folder}: recipe {family.name} merges a LoRA into its weights, and none is there; "
            "add the project's own file (LongLive's is lora.pt), which has "
            f"{family.lora.state_dict!r}, or, for weights that have it in them, give a .toml file "
            "without [lora]"
        )
    if len(fitting) != 1:
        have = ", ".join(str(folder / file) for file in found.lora_files) or str(folder)
        raise UserInputError(
            f"{have}: recipe {family.name} takes one LoRA, {family.lora.state_dict!r} of a .pt, "
            f"and there are {len(fitting)}; copy the project's own file"
        )
    return fitting[0]


def config_of(
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


def first_file(parts: Sequence[FoundPart]) -> str:
    """The file of a part, or the folder of one that diffusers wrote; of the same in two formats,
    that of safetensors."""
    part = min(parts, key=lambda each: not each.files[0].endswith(".safetensors"))
    return part.files[0] if part.naming == "original" else folder_of(part.files[0])


def check_no_lora(folder: Path) -> None:
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
