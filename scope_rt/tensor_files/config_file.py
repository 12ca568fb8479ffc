"""The `config.json` beside the weights of a part: one JSON object."""

import json
from pathlib import Path
from typing import Any

from scope_contracts.errors import UserInputError


def read_config(path: Path, *, fix: str) -> dict[str, Any]:
    """Read it.

    Args:
        fix: what to change where it cannot be read, for the end of the sentence.

    Raises:
        UserInputError: there is none, or it is something else.
    """
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserInputError(f"cannot read {path}: {error!r}; {fix}") from error
    if not isinstance(raw, dict):
        raise UserInputError(f"{path} is no JSON object; {fix}")
    return raw
