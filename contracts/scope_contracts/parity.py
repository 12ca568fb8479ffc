"""Ranks that would compute differently find out at start, before the first model collective."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from scope_contracts.envelope import PlanId
from scope_contracts.errors import ParityError
from scope_contracts.plain import to_plain
from scope_contracts.tensor_spec import DType
from scope_contracts.wire import decode_plain, encode_plain, from_canonical

_ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityKeys:
    """Everything that must be the same on every rank.

    A field's metadata names the environment variable that sets it, if there is one.
    `kv_bias_backend` is the backend in effect, never "auto".
    """

    plan_id: PlanId = field(metadata={_ENVIRONMENT: "SCOPE_TP_PLAN"})
    pp_enabled: bool = field(metadata={_ENVIRONMENT: "SCOPE_PP_ENABLED"})
    kv_cache_recompute_every: int = field(metadata={_ENVIRONMENT: "SCOPE_KV_CACHE_RECOMPUTE_EVERY"})
    kv_bias_backend: str = field(metadata={_ENVIRONMENT: "SCOPE_KV_BIAS_BACKEND"})
    tp_allow_compile: bool = field(metadata={_ENVIRONMENT: "SCOPE_TP_ALLOW_COMPILE"})
    dtype: DType
    torch_version: str
    package_version: str
    model_fingerprint: str
    world_layout: str

    def encode(self) -> bytes:
        """Canonical bytes: equal keys, and only those, give equal bytes. Raises `FieldError`."""
        return encode_plain(to_plain(self))

    @classmethod
    def decode(cls, data: bytes) -> "ParityKeys":
        """The keys another rank encoded; raises `FieldError` or `WireError`."""
        return from_canonical(cls, data, decode_plain(data))


def compare(keys_by_rank: Sequence[ParityKeys]) -> None:
    """Check that all ranks hold the same keys; the position in the sequence is the rank.

    Raises `ParityError` naming the first key that differs, both values and both ranks.
    """
    for rank, keys in enumerate(keys_by_rank):
        for key in fields(ParityKeys):
            want, got = getattr(keys_by_rank[0], key.name), getattr(keys, key.name)
            if got != want:
                name = _shown_name(key.name, key.metadata.get(_ENVIRONMENT))
                raise ParityError(
                    f"{name}: rank 0 has {_shown(want)}, rank {rank} has {_shown(got)}; "
                    "give both the same value"
                )


def _shown_name(name: str, variable: str | None) -> str:
    return name if variable is None else f"{name} ({variable})"


def _shown(value: object) -> str:
    return repr(str(value)) if isinstance(value, str) else repr(value)
