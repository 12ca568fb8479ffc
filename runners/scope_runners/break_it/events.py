"""What happened on every rank, in order of time: a line each, timed by one machine-wide clock.

A line is one write to a file that all ranks append to, so what a rank logged before it was killed
is kept.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from scope_runners.break_it.line_log import append_line


class EventKind(StrEnum):
    """What a rank logs."""

    STARTED = "started"
    """The process runs; `pid`."""
    OPENING = "opening"
    """It is about to join the others."""
    READY = "ready"
    """Its session is open; `chunk`: the first chunk to be planned, after a restart."""
    EMITTED = "emitted"
    """Rank0's consumer has received, and so acknowledged, a chunk; `chunk`, `epoch`, `sha256`."""
    CUT = "cut"
    """A hard cut that was asked for took effect; `chunk`, `epoch`."""
    SHOWN = "shown"
    """A viewer received a chunk; `chunk`, `epoch`."""
    NOTED = "noted"
    """Something that a scenario checks; `text`."""
    RESTORED = "restored"
    """The connection that the suite had cut works again."""
    FAILED = "failed"
    """The rank ends with an error; `error` is its class, `text` its message."""
    LEFT = "left"
    """The rank ended in order."""
    ENDED = "ended"
    """A process has ended: a rank's, or with `rank` -1 the one that `text` names; `code`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`at_s` is of the monotonic clock, which all processes of a machine share."""

    kind: EventKind
    rank: int
    attempt: int
    at_s: float
    pid: int = 0
    chunk: int = -1
    epoch: int = -1
    sha256: str = ""
    error: str = ""
    text: str = ""
    code: int = 0
    """The exit code, or the negative number of the signal that ended the process."""


class EventLog:
    """Appends one rank's events to the file of all ranks."""

    def __init__(self, path: Path, *, rank: int, attempt: int) -> None:
        self._path, self._rank, self._attempt = path, rank, attempt

    def write(self, kind: EventKind, **fields: Any) -> None:
        """Log that it happens now, with what `kind` says of it."""
        event = Event(
            kind=kind,
            rank=self._rank,
            attempt=self._attempt,
            at_s=time.monotonic(),
            pid=os.getpid(),
            **fields,
        )
        append_line(self._path, asdict(event))


def read_events(path: Path) -> tuple[Event, ...]:
    """Every event logged so far, in order."""
    if not path.exists():
        return ()
    plain = [json.loads(line) for line in path.read_text().splitlines()]
    return tuple(Event(**(event | {"kind": EventKind(event["kind"])})) for event in plain)
