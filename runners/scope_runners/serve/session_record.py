"""What a session was made with lies in its folder, until it is deleted."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scope_contracts.errors import UserInputError
from scope_rt.output_file import replacing
from scope_runners.serve.session_files import SessionFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """What a session was made with; times in seconds, since the Unix epoch."""

    id: str
    prompt: str
    settings: Mapping[str, Any]
    lease_s: float
    created_at: float
    forked_from: str = ""


def write_record(files: SessionFiles, record: SessionRecord) -> None:
    """For this server, and those after it."""
    with replacing(files.record, suffixes=(".json",)) as partial:
        partial.write_text(json.dumps(asdict(record)))


def read_record(files: SessionFiles) -> SessionRecord | None:
    """None where the folder holds no session, or one that was deleted.

    Raises:
        UserInputError: it cannot be read.
    """
    if not files.record.exists():
        return None
    try:
        return SessionRecord(**json.loads(files.record.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserInputError(f"{files.record} cannot be read ({error}); remove it") from error
