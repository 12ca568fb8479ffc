"""What the ranks of one run stream is a value that each of them reads from the same file."""

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self


class ConsumerKind(StrEnum):
    """What takes the chunks on rank0."""

    LOG = "log"
    """Nothing but the event log."""
    PIPE = "pipe"
    """A video writer, and a viewer who reads nothing before the stream has ended."""
    IDLE = "idle"
    """A viewer who never reads, and one who reads at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptEvent:
    """What is scheduled at a chunk."""

    chunk: int
    hard_cut: bool = False
    recompute: bool = False
    repeats_prompt: bool = False
    """Whether the same prompt is given again, so that its embedding is sent with this chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a stream is asked to do: all that decides the pixels of its chunks."""

    num_chunks: int = 8
    events: tuple[ScriptEvent, ...] = ()
    recomputes_always: bool = False
    """Whether the model is run as one that keeps its cache by recompute (R0a)."""
    kv_cache: str = "ring"
    needs_its_cache: bool = False
    """Whether it shows something of `kv_cache` alone."""
    has_start_frame: bool = False
    """Whether it begins with a picture, on the model run as one of one latent frame a chunk; the
    file is gone once chunk 0 is shown."""

    def with_events(self, *events: ScriptEvent) -> "Script":
        """The same stream with more that is scheduled."""
        merged = sorted({*self.events, *events}, key=lambda event: event.chunk)
        return replace(self, events=tuple(merged))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a run differs from a stream that nobody interferes with."""

    script: Script = Script()
    differing_rank: int = -1
    """The rank that is started with `differing_plan` and `differing_tp` instead."""
    differing_plan: str = ""
    differing_tp: int = 0
    hard_cut_after: int = -1
    """Rank0's consumer asks for a hard cut when it receives this chunk; -1: never."""
    consumer_kind: ConsumerKind = ConsumerKind.LOG
    records: bool = False
    pause_s: float = 0.0
    """How long rank0's consumer sleeps after every chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob(RunOptions):
    """What every rank of a run is given."""

    model: str
    plan: str
    tp: int
    prompt: str
    folder: str
    """Where the run keeps its files."""
    family: str | None = None
    """As `ModelConfig.recipe`."""
    parts: str | None = None
    """What every rank imports before it opens the model."""

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
    def snapshot(self) -> Path:
        return Path(self.folder) / "snapshot"

    @property
    def recording(self) -> Path:
        return Path(self.folder) / "stream.scope"

    @property
    def image(self) -> Path:
        return Path(self.folder) / "start.png"

    @property
    def video(self) -> Path:
        return Path(self.folder) / "stream.mp4"

    def output(self, rank: int, attempt: int) -> Path:
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
        events = tuple(ScriptEvent(**event) for event in script.pop("events"))
        consumer_kind = ConsumerKind(plain.pop("consumer_kind"))
        return cls(script=Script(events=events, **script), consumer_kind=consumer_kind, **plain)
