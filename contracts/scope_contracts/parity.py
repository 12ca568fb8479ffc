"""Ranks that would compute differently find out before the next model collective."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from hashlib import blake2b
from itertools import zip_longest

import msgpack

from scope_contracts.cache_spec import CacheIndices
from scope_contracts.envelope import PlanId, PPEnvelope
from scope_contracts.errors import ParityError
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.plain import field_types
from scope_contracts.tensor_spec import DType
from scope_contracts.wire import CanonicalMessage, encode

HASH_BYTES = 16
_ENVIRONMENT, _FIX = "environment", "fix"
_SAME = "give both the same value"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityKeys(CanonicalMessage):
    """Everything that must be the same on every rank.

    A field's metadata names the environment variable that sets it, if there is one.
    `kv_bias_backend` is the backend in effect, never "auto". Ranks that leave `processor` empty are
    not compared by it.
    """

    plan_id: PlanId = field(metadata={_ENVIRONMENT: "SCOPE_TP_PLAN"})
    pp_enabled: bool = field(metadata={_ENVIRONMENT: "SCOPE_PP_ENABLED"})
    kv_cache_recompute_every: int = field(metadata={_ENVIRONMENT: "SCOPE_KV_CACHE_RECOMPUTE_EVERY"})
    kv_bias_backend: str = field(metadata={_ENVIRONMENT: "SCOPE_KV_BIAS_BACKEND"})
    kv_cache: str = field(default="ring", metadata={_ENVIRONMENT: "SCOPE_KV_CACHE"})
    recompute_anchor: str
    tp_allow_compile: bool = field(metadata={_ENVIRONMENT: "SCOPE_TP_ALLOW_COMPILE"})
    digest_every: int = field(metadata={_ENVIRONMENT: "SCOPE_DIGEST_EVERY"})
    input_digest: bool = field(metadata={_ENVIRONMENT: "SCOPE_TP_INPUT_DIGEST"})
    heartbeat_timeout_s: float = field(
        default=10.0, metadata={_ENVIRONMENT: "SCOPE_HEARTBEAT_TIMEOUT_S"}
    )
    slow_rank_factor: float = field(default=0.0, metadata={_ENVIRONMENT: "SCOPE_SLOW_RANK_FACTOR"})
    integrity: IntegrityLevel = field(
        default=IntegrityLevel.DEFAULT, metadata={_ENVIRONMENT: "SCOPE_INTEGRITY"}
    )
    verify_within: int = field(default=32, metadata={_ENVIRONMENT: "SCOPE_VERIFY_WITHIN"})
    dtype: DType
    codec_dtype: str = field(default="", metadata={_FIX: "give all ranks one [model] codec_dtype"})
    """Of a rank that decodes; empty on others, which are not compared by it."""
    torch_version: str
    package_version: str
    model_fingerprint: str
    """Empty where all ranks read the very same files."""
    model_recipe: str = ""
    """Digest of what the model's recipe says, wherever that stands."""
    start_frame: bool = False
    """Whether chunk 0 is a picture (`--image`), which rank0 alone reads."""
    world_layout: str
    processor: str = field(
        default="",
        metadata={
            _FIX: "unlike processors compute unlike bits, and what ranks compute is compared: give "
            "both the same kind (ATEN_CPU_CAPABILITY lowers a CPU's), or start all ranks with "
            "--integrity off"
        },
    )
    """Of a rank whose results are compared with others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarDigest(CanonicalMessage):
    """What a generator rank is about to run and where its cache stands: host scalars only.

    The indices are those of one layer, the same on every rank. Ranks compare these every N chunks.
    """

    call_id: int
    chunk_index: int
    cache_epoch: int
    current_start_frame: int
    init_cache: bool
    reset_crossattn_cache: bool
    do_kv_recompute: bool
    clean_pass: bool
    num_denoise_steps: int
    denoising_step_list: tuple[float, ...]
    kv_cache_attention_bias: float
    base_seed: int
    global_end_index: int
    local_end_index: int
    conditioning: str = ""
    """Digest of the text in effect, in hexadecimal."""
    frames_kept: tuple[int, ...] = ()
    """Latent frames in the cache before the chunk, in slot order; empty where no scores decide."""
    scores: str = ""
    """Digest of those scores, in hexadecimal; empty where `frames_kept` is."""

    @classmethod
    def of(
        cls,
        envelope: PPEnvelope,
        indices: CacheIndices,
        *,
        conditioning: str = "",
    ) -> "ScalarDigest":
        """The scalars of `envelope` beside the cache's state and the text in effect."""
        return cls(
            **{name: getattr(envelope, name) for name in _shared_names()},
            global_end_index=indices.global_end_index,
            local_end_index=indices.local_end_index,
            conditioning=conditioning,
        )


def state_hash(envelope: PPEnvelope, indices: CacheIndices, *, conditioning: str = "") -> bytes:
    """What a rank ran, and where its cache and its text then stand: a result carries it.

    `HASH_BYTES` bytes: BLAKE2b of the envelope's canonical bytes and the packed array of both
    indices and `conditioning`. What scores keep is not in it: rank0 has none, and cannot know.
    """
    stands = msgpack.packb((indices.global_end_index, indices.local_end_index, conditioning))
    return blake2b(encode(envelope) + stands, digest_size=HASH_BYTES).digest()


@cache
def _shared_names() -> frozenset[str]:
    """What a digest takes from an envelope."""
    return frozenset(field_types(ScalarDigest)) & frozenset(field_types(PPEnvelope))


def compare(keys_by_rank: Sequence[ParityKeys]) -> None:
    """Check that all ranks hold the same keys; the position in the sequence is the rank.

    Raises `ParityError` naming the first key that differs, both values and both ranks.
    """
    _compare(keys_by_rank, range(len(keys_by_rank)), where="", fix=_SAME)


def compare_digests(digests: Sequence[ScalarDigest], ranks: Sequence[int]) -> None:
    """Check that all ranks are about to run the same chunk on the same cache.

    Raises `ParityError` naming the first scalar that differs, both values and both ranks.
    """
    _compare(digests, ranks, where=f"chunk {digests[0].chunk_index}: ")


def compare_numerics(settings: Sequence[Sequence[str]], ranks: Sequence[int]) -> None:
    """Check that all ranks compute under the same numeric settings, each a `name=value`.

    Raises `ParityError` naming the first setting that differs, both values and both ranks.
    """
    for rank, each in zip(ranks, settings, strict=True):
        for want, got in zip_longest(settings[0], each, fillvalue="nothing"):
            if got != want:
                raise ParityError(
                    f"numeric settings: rank {ranks[0]} has {want}, rank {rank} has {got}; give "
                    "both the same"
                )


def _compare(
    values: Sequence[ParityKeys] | Sequence[ScalarDigest],
    ranks: Sequence[int],
    *,
    where: str,
    fix: str = "",
) -> None:
    for key in fields(values[0]):
        told = [(rank, getattr(value, key.name)) for rank, value in zip(ranks, values, strict=True)]
        if _FIX in key.metadata:
            told = [(rank, value) for rank, value in told if value]
        for rank, got in told:
            first, want = told[0]
            if got != want:
                name = _shown_name(key.name, key.metadata.get(_ENVIRONMENT))
                what_to_do = key.metadata.get(_FIX, fix)
                raise ParityError(
                    f"{where}{name}: rank {first} has {_shown(want)}, rank {rank} has "
                    f"{_shown(got)}{what_to_do and '; '}{what_to_do}"
                )


def _shown_name(name: str, variable: str | None) -> str:
    return name if variable is None else f"{name} ({variable})"


def _shown(value: object) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)
