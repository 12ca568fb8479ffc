"""The records of a stream log: what was asked, planned, made and kept, in the order it happened.

A record is one canonical map that names its `kind`; equal records have equal bytes, and no other
bytes are accepted. How records lie in a file: `log_file`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar

import msgpack

from scope_contracts.envelope import ENVELOPE_VERSION, PlanId, PPEnvelope
from scope_contracts.errors import FieldError, VersionError, WireError, mismatch
from scope_contracts.field_encoder import FieldEncoder
from scope_contracts.plain import PlainRules, from_plain
from scope_contracts.retraction import Retraction
from scope_contracts.tensor_spec import DType, TensorSpec
from scope_contracts.wire import MAX_MESSAGE_BYTES, decode_plain, encode, require_size

LOG_VERSION = 7
MAX_RECORD_BYTES = MAX_MESSAGE_BYTES
MAX_BLOB_BYTES = 256 * 2**20
MAX_PROMPT_BYTES = 16 * 2**10
"""Of UTF-8: a record holds a prompt and more, and one that cannot be written ends its log."""
NOT_RESUMED = -1
UNCHANGED = -1
"""A seed that nobody asked for."""
_RULES = PlainRules(max_string_bytes=MAX_RECORD_BYTES)
"""A prompt or an error may fill the record."""


class RecordKind(StrEnum):
    """What a record tells."""

    OPENED = "opened"
    BEGUN = "begun"
    START_FRAME = "start_frame"
    SCHEDULED = "scheduled"
    CONTROL = "control"
    PLANNED = "planned"
    FINISHED = "finished"
    DROPPED = "dropped"
    SEGMENT = "segment"
    DURABLE = "durable"
    PUBLISHED = "published"
    RETRACTED = "retracted"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Something that happened at `at_s`, in seconds since the Unix epoch by rank0's clock."""

    kind: ClassVar[RecordKind]
    minimums: ClassVar[Mapping[str, int]] = {}
    """The least value of a field that whoever reads the record would stumble over."""

    at_s: float

    def __post_init__(self) -> None:
        for name, least in self.minimums.items():
            if (value := getattr(self, name)) < least:
                raise FieldError(mismatch(name, got=value, want=f"at least {least}"))

    @property
    def num_blob_bytes(self) -> int:
        """Length of the blob that follows the record, 0 where none does; raises `FieldError`."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(Record):
    """A session began, or resumed a stream at a chunk: all that is needed to run it again.

    `backend` is the attention backend in effect, `model` the name or folder as it was given,
    `kv_cache_recompute_every` in chunks, `kv_cache` what `CacheChoice.named` reads,
    `recompute_anchor` where the oldest context frame of a recompute comes from, `run_id` the same
    for every start of the ranks by one launcher, "" where there is none.
    """

    kind: ClassVar = RecordKind.OPENED
    minimums: ClassVar = dict.fromkeys(("height", "width", "fps", "tp_degree"), 1)

    log_version: int = LOG_VERSION
    package_version: str
    torch_version: str
    model: str
    model_fingerprint: str
    recipe: str
    """As `--recipe` takes it, or `recipe.json` for the model's own."""
    plan_id: PlanId
    tp_degree: int
    height: int
    width: int
    dtype: DType
    codec_dtype: DType
    """Of rank0's codec."""
    text_dtype: DType
    base_seed: int
    kv_cache_attention_bias: float
    backend: str
    kv_cache_recompute_every: int
    recompute_anchor: str
    kv_cache: str = "ring"
    frames_per_block: int
    fps: int
    settings: str = ""
    """All that differed from the defaults, for a person."""
    resumed_at_chunk: int = NOT_RESUMED
    run_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Record):
    """A stream was asked for with `prompt`; its schedule follows, one record for each event."""

    kind: ClassVar = RecordKind.BEGUN

    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFrame(Record):
    """Chunk 0 is a picture: `image` is its file's absolute path, `image_sha256` of its bytes.

    The blob is the picture's latents, as `latents` describes them and `latents_sha256` over their
    bytes: they are a fraction of a MiB, and whoever resumes the stream needs no file.
    """

    kind: ClassVar = RecordKind.START_FRAME

    image: str
    image_sha256: str
    latents: TensorSpec
    latents_sha256: str

    @property
    def num_blob_bytes(self) -> int:
        return _num_latent_bytes(self.latents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled(Record):
    """An event of a stream's schedule as asked for, at the first chunk from `chunk_index` on.

    There is a new prompt exactly if `prompt` is not None, and it comes in by a soft transition
    exactly if `transition_num_chunks` is above 0.
    """

    kind: ClassVar = RecordKind.SCHEDULED
    minimums: ClassVar = {"chunk_index": 0, "transition_num_chunks": 0}

    chunk_index: int
    prompt: str | None = None
    hard_cut: bool = False
    transition_num_chunks: int = 0
    transition_method: str = ""
    transition_bias_floor: float = 1.0
    recompute: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(Record):
    """What a person asked for, and the chunk at which it took effect.

    There is a new prompt exactly if `embeds_sha256` is not empty, and it comes in by a soft
    transition exactly if `transition_num_chunks` is above 0. `kv_cache_attention_bias` is a new
    resting value where it is above 0, `base_seed` a new one from 0 on. `command_ids` name the
    commands that this answers, for who sends them again after a loss.
    """

    kind: ClassVar = RecordKind.CONTROL
    minimums: ClassVar = {"chunk_index": 0, "transition_num_chunks": 0, "base_seed": UNCHANGED}

    chunk_index: int
    prompt: str = ""
    embeds_sha256: str = ""
    hard_cut: bool = False
    drop_in_flight: bool = False
    transition_num_chunks: int = 0
    transition_method: str = ""
    transition_bias_floor: float = 1.0
    recompute: bool = False
    kv_cache_attention_bias: float = 0.0
    base_seed: int = UNCHANGED
    command_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Record):
    """An envelope that passed every check and was sent."""

    kind: ClassVar = RecordKind.PLANNED

    envelope: PPEnvelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Record):
    """A chunk that was emitted; the blob is its latents, as `latents` describes them, or empty
    where that is None.

    `num_frames` counts pictures, `latents_sha256` is over the bytes of the latents.
    """

    kind: ClassVar = RecordKind.FINISHED
    minimums: ClassVar = {"chunk_index": 0, "num_frames": 0}

    chunk_index: int
    cache_epoch: int
    prompt: str
    num_frames: int
    observed_generator_calls: int
    recomputed: bool
    kv_cache_attention_bias: float
    latents_sha256: str
    latents: TensorSpec | None
    stage_ms: tuple[tuple[str, float], ...] = ()

    @property
    def num_blob_bytes(self) -> int:
        return 0 if self.latents is None else _num_latent_bytes(self.latents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Record):
    """A chunk whose epoch a hard cut had ended before it came; nobody saw it."""

    kind: ClassVar = RecordKind.DROPPED
    minimums: ClassVar = {"chunk_index": 0}

    chunk_index: int
    cache_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(Record):
    """A file of video packets begins; those of equal format can be joined to one video.

    `width` and `height` in pixels, `fps` as a fraction. `extradata` is the encoder's own header, in
    hexadecimal: a player reads it once for all frames.
    """

    kind: ClassVar = RecordKind.SEGMENT
    minimums: ClassVar = dict.fromkeys(("width", "height"), 1) | {"number": 0}

    number: int
    codec: str
    width: int
    height: int
    fps: str
    extradata: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable(Record):
    """All packets of a chunk lie in segment `segment`, before byte `end_bytes` of its file.

    `num_frames` counts pictures, `crc32` is over the bytes of its packets as they were encoded.
    `digest` is the BLAKE2b-128, in hexadecimal, of all bytes of the file before `end_bytes`.
    """

    kind: ClassVar = RecordKind.DURABLE
    minimums: ClassVar = {"chunk_index": 0, "segment": 0, "end_bytes": 0, "num_frames": 1}

    chunk_index: int
    segment: int
    end_bytes: int
    num_frames: int
    crc32: int
    digest: str
    encode_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Record):
    """The whole video is under its own name; the segments may be gone.

    It has `num_bytes` bytes, of which `digest` is the BLAKE2b-128, in hexadecimal.
    """

    kind: ClassVar = RecordKind.PUBLISHED
    minimums: ClassVar = {"num_bytes": 0}

    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retracted(Record):
    """Chunks whose records stand before this one are suspect; whoever resumes makes them again."""

    kind: ClassVar = RecordKind.RETRACTED

    retraction: Retraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Record):
    """An error ended the stream after `chunk_index` was planned (-1: before any was)."""

    kind: ClassVar = RecordKind.FAILED

    chunk_index: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Record):
    """The stream ended in order."""

    kind: ClassVar = RecordKind.CLOSED


def _num_latent_bytes(latents: TensorSpec) -> int:
    """Raises `FieldError`."""
    if min(latents.shape, default=0) < 0 or latents.num_bytes > MAX_BLOB_BYTES:
        want = f"no negative length, at most {MAX_BLOB_BYTES} bytes"
        raise FieldError(mismatch("latents.shape", got=latents.shape, want=want))
    return latents.num_bytes


_KINDS: dict[str, type[Record]] = {
    kind.kind: kind
    for kind in (
        *(Opened, Begun, StartFrame, Scheduled, Control, Planned, Finished, Dropped),
        *(Segment, Durable, Published, Retracted, Failed, Closed),
    )
}


def encode_record(record: Record) -> bytes:
    """The canonical map of a record, without frame and blob; raises what `pack` does."""
    if isinstance(record, Planned):
        return _encode_planned(record)
    kind: Any = type(record)
    data = _encoder(kind).encode(record)
    require_size(data)
    return data


@cache
def _encoder(kind: Any) -> FieldEncoder:
    return FieldEncoder(kind, _RULES, kind=str(kind.kind))


def _encode_planned(record: Planned) -> bytes:
    """The same map around an envelope that is encoded already: there is one for every chunk."""
    if type(record.at_s) is not float or not math.isfinite(record.at_s):
        raise FieldError(mismatch("at_s", got=record.at_s, want="a finite number"))
    envelope = encode(record.envelope)
    data = b"".join((_MAP_OF_3, _AT_S, msgpack.packb(record.at_s), _ENVELOPE, envelope, _PLANNED))
    require_size(data)
    return data


_MAP_OF_3 = b"\x83"
_AT_S, _ENVELOPE, _PLANNED = (
    b"".join(map(msgpack.packb, texts))
    for texts in (("at_s",), ("envelope",), ("kind", str(RecordKind.PLANNED)))
)


def decode_record(data: bytes, *, is_compared: bool = True) -> Record:
    """The inverse of `encode_record`.

    Raises `VersionError` for another log or envelope version, `FieldError` for an unknown kind or
    a wrong field and, where it `is_compared`, `WireError` for bytes that are not the canonical
    ones.
    """
    plain = decode_plain(data)
    name = plain.pop("kind", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise FieldError(mismatch("kind", got=name, want=f"one of {', '.join(_KINDS)}"))
    if kind is Opened:
        _require_version("log_version", plain, LOG_VERSION)
        _require_version("recording_version", plain, LOG_VERSION)  # its name before version 3
    if kind is Planned and isinstance(envelope := plain.get("envelope"), dict):
        _require_version("pp_envelope_version", envelope, ENVELOPE_VERSION)
    record = from_plain(kind, plain, _RULES)
    if is_compared and encode_record(record) != data:
        want = "canonical msgpack: sorted keys, shortest forms, float64"
        raise WireError(mismatch("record", got=f"{len(data)} other bytes", want=want))
    return record


def _require_version(name: str, plain: dict[str, object], known: int) -> None:
    """Refuse a foreign version first: its other fields mean nothing to us."""
    version = plain.get(name)
    if type(version) is int and version != known:
        fix = "read it with the package version that wrote it"
        raise VersionError(mismatch(name, got=version, want=known, fix=fix))
