"""Which folder holds a model, where the one that was given is a level too high or too deep."""

from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_rt.models.recipe import RECIPE_NAME

WAN_MODELS = "wan_models"
"""What the projects' instructions leave beside a checkpoint."""
LEVELS = 3
"""So many folders up from a part of a model at most."""
_MARKS = (WAN_MODELS, "transformer/config.json", RECIPE_NAME)
_MOST_NAMED = 3


def holds_model(folder: Path) -> bool:
    """Whether a folder looks like one of a model, whatever may be wrong in it."""
    try:
        return any((folder / mark).exists() for mark in _MARKS)
    except OSError:  # nobody may look into it
        return False


def check_level(folder: Path) -> None:
    """Refuse what is no model folder, where one lies directly in it or around it.

    Raises:
        UserInputError: naming the model folder, or the first of several.
    """
    if holds_model(folder):
        return
    inside = [each for each in sorted(folder.glob("*")) if holds_model(each)]
    if inside:
        named = ", ".join(map(str, inside[:_MOST_NAMED]))
        more = f" and {len(inside) - _MOST_NAMED} more" if len(inside) > _MOST_NAMED else ""
        found = "holds one: give" if len(inside) == 1 else "holds several: give one of"
        raise UserInputError(f"{folder} is no model folder, but {found} {named}{more}")
    for around in folder.resolve().parents[:LEVELS]:
        if holds_model(around):
            raise UserInputError(f"{folder} is a part of the model folder {around}: give that")
