"""A client names no file of this machine: it has the models that are offered, and so many ranks."""

import re
from collections.abc import Mapping
from typing import Any

from scope_contracts.errors import UserInputError
from scope_runners.serve.settings import ServeSettings

_FAMILY = re.compile(r"(?!.*\.toml$)[A-Za-z0-9][A-Za-z0-9._-]*")


def check_asked(asked: Mapping[str, Any], server: ServeSettings) -> None:
    """Check the settings that a client gives for a stream.

    Raises:
        UserInputError: one of them is not a client's to choose.
    """
    height, width = asked.get("height"), asked.get("width")
    model, recipe, ranks = asked.get("model"), asked.get("recipe"), asked.get("tp")
    if model is not None and model not in server.models:
        raise UserInputError(
            f"model {str(model)[:64]!r} is not offered here; give one of "
            f"{', '.join(server.models)}, or start the server with --model"
        )
    if recipe is not None and not _FAMILY.fullmatch(str(recipe)):
        raise UserInputError(f"recipe {str(recipe)[:64]!r}: give the name of a family, and no file")
    if isinstance(ranks, int) and ranks >= server.max_ranks:
        raise UserInputError(
            f"tp {ranks}: a session may have {server.max_ranks} ranks, rank0 included; start the "
            "server with a larger --max-ranks"
        )
    sides = [side for side in (height, width) if isinstance(side, int)]
    if sides and sides[0] * sides[-1] > server.max_pixels:  # of one side alone, its square
        raise UserInputError(
            f"height and width: a picture may have {server.max_pixels} pixels; ask for fewer, or "
            "start the server with a larger --max-pixels"
        )
