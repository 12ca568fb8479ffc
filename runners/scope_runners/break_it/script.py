"""What the ranks of a run stream is one value that each of them reads from a file."""

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self


class Audience(StrEnum):
    """What takes the chunks on rank0."""

    LOG = "log"
    """Nothing but the event log."""
    PIPE = "pipe"
    """A video writer, and a viewer who reads nothing before the stream has ended."""
    IDLE = "idle"
    """A viewer who never reads, and one who reads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """What is scheduled at a chunk."""

    chunk: int
    hard_cut: bool = False
    recompute: bool = False
    says_again: bool = False
    """Whether the prompt is said again, so that the text is sent with this chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One stream, as far as it decides what chunks must look like."""

    num_chunks: int = 8
    cues: tuple[Cue, ...] = ()
    rebuilds: bool = False
    """Whether the model is run as one that keeps its cache by recompute (R0a)."""

    def with_cues(self, *cues: Cue) -> "Script":
        """The same stream with more that is scheduled."""
        return replace(self, cues=tuple(sorted({*self.cues, *cues}, key=lambda cue: cue.chunk)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What every rank of a run is told."""

    model: str
    plan: str
    tp: int
    prompt: str
    script: Script
    folder: str
    """Where the run keeps its files."""
    odd_rank: int = -1
    """This rank is started with `odd_plan` and `odd_tp` instead."""
    odd_plan: str = ""
    odd_tp: int = 0
    hard_cut_after: int = -1
    """Rank0's consumer asks for a hard cut when it is handed this chunk."""
    audience: Audience = Audience.LOG
    records: bool = False
    pause_s: float = 0.0
    """Rank0's consumer rests so long after every chunk."""

    @property
    def path(self) -> Path:
        """Where the ranks read this."""
        return Path(self.folder) / "job.json"

    @property
    def events(self) -> Path:
        return Path(self.folder) / "events.jsonl"

    @property
    def faults(self) -> Path:
        return Path(self.folder) / "faults.jsonl"

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / "checkpoint"

    @property
    def recording(self) -> Path:
        return Path(self.folder) / "stream.scope"

    @property
    def video(self) -> Path:
        return Path(self.folder) / "stream.mp4"

    def speech(self, rank: int, attempt: int) -> Path:
        """What a rank writes to its standard output and error."""
        return Path(self.folder) / f"rank{rank}.{attempt}.txt"

    def save(self) -> Path:
        """Write it to `path`."""
        self.path.write_text(json.dumps(asdict(self)))
        return self.path

    @classmethod
    def load(cls, path: Path) -> Self:
        plain: dict[str, Any] = json.loads(path.read_text())
        script = plain.pop("script")
        cues = tuple(Cue(**cue) for cue in script.pop("cues"))
        audience = Audience(plain.pop("audience"))
        return cls(script=Script(cues=cues, **script), audience=audience, **plain)
