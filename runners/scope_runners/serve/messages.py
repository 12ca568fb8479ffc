"""What the server and the ranks of a session tell each other; each is one frozen value.

Chunks are told apart by index and epoch; which may be begun is said by index alone (`Credit`).
"""

from dataclasses import dataclass
from enum import StrEnum

from scope_contracts.retraction import Retraction


class Role(StrEnum):
    """Who connects to the server."""

    RANK0 = "rank0"
    LAUNCHER = "launcher"


class CommandKind(StrEnum):
    """What a person may ask of a stream; those of the server never reach rank0."""

    PROMPT = "prompt"
    HARD_CUT = "hard_cut"
    BIAS = "bias"
    SEED = "seed"
    REWIND = "rewind"
    PAUSE = "pause"
    RESUME = "resume"
    RECORD_START = "record_start"
    RECORD_STOP = "record_stop"
    SCHEDULE = "schedule"


class RankState(StrEnum):
    """What the launcher knows of a rank."""

    STARTING = "starting"
    RUNNING = "running"
    LOST = "lost"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a connection."""

    role: Role
    session_id: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The server's answer to rank0: what it has taken of this stream."""

    num_taken: int
    """Chunks since the stream began, those that rank0 will make again left out."""
    last_taken: int
    """The index of the last of them; -1 where there is none."""
    orphan_s: float
    """How long rank0 and the launcher wait for a server that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Where a command took effect that a process before had taken."""

    command_id: str
    chunk_index: int
    cache_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """Rank0 can stream: its ranks have met and loaded the model. Sizes in pixels."""

    attempt: int
    fps: int
    height: int
    width: int
    plan: str
    tp: int
    world_size: int
    max_in_flight: int
    chunk_frames: int
    """Pictures of a chunk that does not begin an epoch."""
    cache_bytes: int
    """Of one generator rank's cache."""
    next_chunk: int
    """The first chunk that this process may plan; older ones may be given again."""
    resumed: bool
    """Whether chunks from there on, where the server has them, are made again."""
    broken_on_purpose: str = ""
    resting_bias: float = 1.0
    """How much past chunks weigh before a command says otherwise."""
    prompt_words: tuple[str, ...] = ()
    """All that a prompt may name; empty where it may be any text."""
    applied: tuple[Applied, ...] = ()
    retractions: tuple[Retraction, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """A chunk; the body is its frames, uint8 `[num_frames, height, width, 3]`."""

    chunk_index: int
    cache_epoch: int
    prompt: str
    num_frames: int
    height: int
    width: int
    crc32: int
    """Over the body."""
    generator_calls: int
    recomputed: bool
    bias: float
    cache_fill: float
    """The part of the attention window that the epoch has filled, 0 to 1."""
    latents_sha256: str
    stage_ms: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The server has so many chunks of this stream for good."""

    num_taken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Chunks with an index below `end` may be begun."""

    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What the next chunks begin with, until others come; the body is `num_frames` pictures as of a
    chunk. None of them is no input any more."""

    num_frames: int
    height: int
    width: int
    noise_scale: float
    crc32: int
    """Over the body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Something for rank0 to take; fields that its kind does not need keep their defaults."""

    command_id: str
    kind: CommandKind
    text: str = ""
    hard_cut: bool = False
    transition_chunks: int = 0
    """0 is at once."""
    transition_method: str = ""
    bias: float = 0.0
    """Of a transition the extreme value in its middle, 0 for the resting one."""
    seed: int = 0
    chunk_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a command: where it took effect, or why it never will."""

    command_id: str
    chunk_index: int = -1
    cache_epoch: int = -1
    superseded: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retracted:
    """Chunks that rank0 has found wrong after the server had them."""

    retraction: Retraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Rank0 ends by this sentence; the launcher decides whether the ranks start again."""

    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent:
    """A rank started or ended."""

    attempt: int
    rank: int
    state: RankState
    pid: int
    code: int = 0
    """As a shell counts; meaningful once it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    """No rank runs any more, and none will be started: `code` as a shell counts."""

    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The receiver ends the stream in order."""


Message = (
    Hello
    | Welcome
    | RankReady
    | ChunkHeader
    | Taken
    | Credit
    | Pictures
    | Command
    | Outcome
    | Retracted
    | Failed
    | RankEvent
    | GroupEnded
    | End
)
