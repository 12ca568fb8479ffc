"""What a soak has seen, line by line, in one file that outlives every process that writes to it.

A line is one write, so what a rank said before it was killed stays said. Times are of the monotonic
clock, which all processes of a machine share until it is started again.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Something that happened at `at_s`, in the given `attempt` of the group."""

    kind: ClassVar[str]

    at_s: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched(Line):
    """A person started the soak, or went on with it; `attempt` is the first of this launcher."""

    kind: ClassVar = "launched"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Line):
    """A rank runs as process `pid`."""

    kind: ClassVar = "started"

    rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Line):
    """Rank0's session is open; its consumer holds `num_held` chunks from before."""

    kind: ClassVar = "opened"

    num_held: int
    resumed_at_chunk: int
    """The first chunk to be planned, -1 where the stream starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown(Line):
    """Rank0's consumer was handed a chunk, the `number`th of the video."""

    kind: ClassVar = "shown"

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
class Asked(Line):
    """A cue was posted, maybe again because an answer was lost."""

    kind: ClassVar = "asked"

    cue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Took(Line):
    """The cue was acknowledged: it took effect at this chunk, where a later prompt may have taken
    the place of its own."""

    kind: ClassVar = "took"

    cue: int
    chunk_index: int
    superseded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen(Line):
    """The chunk that the acknowledgement named shows it."""

    kind: ClassVar = "seen"

    cue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swallowed(Line):
    """The chunk that the acknowledgement named, planned again after a crash, does not show it."""

    kind: ClassVar = "swallowed"

    cue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(Line):
    """The fault from outside was about to happen to process `pid`."""

    kind: ClassVar = "broken"

    fault: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Line):
    """A rank ends by an error."""

    kind: ClassVar = "failed"

    rank: int
    error: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Line):
    """The launcher saw a rank end."""

    kind: ClassVar = "ended"

    rank: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed(Line):
    """A process has `rss_bytes` in memory. `rank` -1 is the launcher, -2 the process it forks."""

    kind: ClassVar = "weighed"

    rank: int
    rss_bytes: int
    num_shown: int
    """Chunks that its attempt has shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted(Line):
    """A sentence for the report; it is a complaint."""

    kind: ClassVar = "noted"

    text: str


_KINDS: dict[str, type[Line]] = {
    kind.kind: kind
    for kind in (
        *(Launched, Started, Opened, Shown, Asked, Took, Seen, Swallowed),
        *(Broken, Failed, Ended, Weighed, Noted),
    )
}


L = TypeVar("L", bound=Line)


class Diary:
    """A file that all processes of a soak append to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, line: Line) -> None:
        """Write it down."""
        text = json.dumps({"kind": line.kind} | asdict(line)) + "\n"
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)

    def read(self) -> "Reader":
        """All lines so far, and later the new ones."""
        return Reader(self.path)


class Log:
    """The diary of one rank, or of the launcher, in one attempt."""

    def __init__(self, diary: Diary, *, attempt: int) -> None:
        self.attempt = attempt
        self._diary = diary

    def tell(self, kind: type[L], **fields: Any) -> L:
        """Write down what happens now."""
        line = kind(at_s=time.monotonic(), attempt=self.attempt, **fields)
        self._diary.add(line)
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


def held(lines: Iterable[Line]) -> list[Shown]:
    """The chunks of the video, across restarts: a consumer that came back says how many it held."""
    chunks = list[Shown]()
    for line in lines:
        match line:
            case Opened(num_held=num_held):
                del chunks[num_held:]
            case Shown():
                chunks.append(line)
    return chunks
