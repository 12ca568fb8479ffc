"""Which folder holds a model, where the one that was given is a level too high or too deep."""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_rt.models.recipe import RECIPE_NAME

WAN_MODELS = "wan_models"
"""What the projects' instructions leave beside a checkpoint."""
LEVELS = 3
"""So many folders up from a part of a model at most, or down to one."""
_MARKS = (WAN_MODELS, "transformer/config.json", RECIPE_NAME)
_MOST_NAMED = 3


def holds_model(folder: Path) -> bool:
    """Whether a folder looks like one of a model, whatever may be wrong in it."""
    try:
        return any((folder / mark).exists() for mark in _MARKS)
    except OSError:  # nobody may look into it
        return False


def models_in(folder: Path, levels: int = LEVELS) -> Iterator[Path]:
    """The model folders so many levels in at most, and none that lies in another of them."""
    try:
        inside = sorted(each for each in folder.iterdir() if each.is_dir())
    except OSError:  # nobody may look into it
        return
    for each in inside:
        if each.name.startswith("."):
            continue
        if holds_model(each):
            yield each
        elif levels > 1:
            yield from models_in(each, levels - 1)


def check_not_several(folder: Path) -> None:
    """Refuse what holds several model folders, whose files would be gathered for one.

    Raises:
        UserInputError: naming the first of them.
    """
    if holds_model(folder):
        return
    inside = [*{each.resolve(): each for each in models_in(folder)}.values()]
    if len(inside) > 1:
        named = ", ".join(map(str, inside[:_MOST_NAMED]))
        more = f" and {len(inside) - _MOST_NAMED} more" if len(inside) > _MOST_NAMED else ""
        raise UserInputError(
            f"{folder} is no model folder, but holds several: give one of {named}{more}"
        )


def check_own(folder: Path, parts: Iterable[Path]) -> None:
    """Refuse `parts` of a model folder that lie in another one inside it.

    Raises:
        UserInputError: naming a part and both folders.
    """
    if not (folder / WAN_MODELS).is_dir():
        return
    for part in parts:
        for around in takewhile(lambda each: each != folder, part.parents):
            if (around / WAN_MODELS).is_dir():
                raise UserInputError(
                    f"{folder} would take {part}, which is of the model folder {around}: give that "
                    "one, or move it out"
                )


def check_level(folder: Path) -> None:
    """Refuse what is no model folder, where one lies in it or around it.

    Raises:
        UserInputError: naming the model folder.
    """
    if holds_model(folder):
        return
    if inside := [*models_in(folder)]:
        raise UserInputError(f"{folder} is no model folder, but holds one: give {inside[0]}")
    for around in folder.resolve().parents[:LEVELS]:
        if holds_model(around):
            raise UserInputError(f"{folder} is a part of the model folder {around}: give that")


def folder_around(file: Path) -> Path:
    """Where the other parts lie, as the projects' instructions have it. Raises UserInputError."""
    for folder in file.resolve().parents[:LEVELS]:
        if (folder / WAN_MODELS).is_dir():
            return folder
    raise UserInputError(
        f"{file} is a transformer at most, and no folder around it has {WAN_MODELS}/ with VAE and "
        "text encoder; give a folder that has all"
    )
