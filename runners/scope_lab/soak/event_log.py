"""What happened in a soak, one event a line, in one file that outlives every process writing it.

A line is one write, so what a rank wrote before it was killed stays. Times are of the monotonic
clock, which all processes of a machine share until it is started again.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from scope_runners.break_it.line_log import append_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Something that happened at `at_s`, in the given `attempt` of the group."""

    at_s: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched(Line):
    """The soak was started or resumed; `attempt` is the first of this launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Line):
    """A rank runs as process `pid`."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Line):
    """Rank0's session is open; its consumer has `num_acknowledged` chunks from before."""

    num_acknowledged: int
    resumed_at_chunk: int
    """The first chunk to be planned, -1 where the stream starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown(Line):
    """Rank0's consumer was handed a chunk, the `number`th of the video."""

    number: int
    chunk_index: int
    cache_epoch: int
    prompt: str
    latents_sha256: str
    frames_sha256: str
    num_frames: int
    thumbnail: str
    """Of its middle frame, as `video.thumbnail` makes it, in hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CueSent(Line):
    """A cue was sent, maybe again because its acknowledgement was lost."""

    cue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CueAcknowledged(Line):
    """The cue was acknowledged: it took effect at this chunk, where a later prompt may have taken
    the place of its own."""

    cue: int
    chunk_index: int
    superseded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CueShown(Line):
    """The chunk that the acknowledgement named shows it."""

    cue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CueLost(Line):
    """The chunk that the acknowledgement named, planned again after a crash, does not show it."""

    cue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultInjected(Line):
    """The fault from outside is about to be injected into process `pid`."""

    fault: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Line):
    """A rank ends by an error."""

    rank: int
    error: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Line):
    """The launcher saw a rank end."""

    rank: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySampled(Line):
    """A process has `rss_bytes` in memory. `rank` -1 is the launcher, -2 the process it forks."""

    rank: int
    rss_bytes: int
    num_shown: int
    """Chunks that its attempt has shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint(Line):
    """Something is wrong: a sentence for the report."""

    text: str


_KINDS: dict[str, type[Line]] = {
    kind.__name__: kind
    for kind in (
        *(Launched, Started, Opened, Shown, CueSent, CueAcknowledged, CueShown, CueLost),
        *(FaultInjected, Failed, Ended, MemorySampled, Complaint),
    )
}


L = TypeVar("L", bound=Line)


class EventLog:
    """A file that all processes of a soak append to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, line: Line) -> None:
        """Append one line."""
        append_line(self.path, {"kind": type(line).__name__} | asdict(line))

    def read(self) -> "Reader":
        """All lines so far, and later the new ones."""
        return Reader(self.path)


class AttemptLog:
    """The event log of one rank, or of the launcher, in one attempt."""

    def __init__(self, event_log: EventLog, *, attempt: int) -> None:
        self.attempt = attempt
        self._event_log = event_log

    def write(self, kind: type[L], **fields: Any) -> L:
        """Append what happens now."""
        line = kind(at_s=time.monotonic(), attempt=self.attempt, **fields)
        self._event_log.add(line)
        return line


class Reader:
    """Gives every line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[Line]:
        """The lines that were added since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for text in file:
                if text.endswith(b"\n"):
                    self._offset += len(text)
                    yield _line(json.loads(text))


def _line(plain: dict[str, Any]) -> Line:
    return _KINDS[plain.pop("kind")](**plain)


def acknowledged(lines: Iterable[Line]) -> list[Shown]:
    """The chunks of the video, across restarts: a resumed consumer says how many it has."""
    chunks = list[Shown]()
    for line in lines:
        match line:
            case Opened(num_acknowledged=num_acknowledged):
                del chunks[num_acknowledged:]
            case Shown():
                chunks.append(line)
    return chunks
