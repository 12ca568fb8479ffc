"""The contract between the ranks of a stream: messages, their bytes, and the rules they obey.

Needs the standard library and msgpack only, so that every rank and every tool can import it.
"""

from scope_contracts.cache_spec import CacheIndices, KVCacheSpec
from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    ENVELOPE_VERSION,
    INPUT_TENSORS,
    LATENTS_IN,
    LATENTS_OUT,
    MessageKind,
    PlanId,
    PPEnvelope,
    PPResult,
    shutdown_envelope,
)
from scope_contracts.errors import (
    CacheError,
    CallCountError,
    ContractError,
    EpochError,
    FieldError,
    LifecycleError,
    LinkError,
    LinkTimeoutError,
    OrderError,
    ParityError,
    PeerLostError,
    PreflightError,
    ScopeError,
    StartFrameError,
    UserInputError,
    VersionError,
    WireError,
)
from scope_contracts.geometry import PATCH_SIZE, ChunkGeometry
from scope_contracts.lifecycle import CacheState, Lifecycle
from scope_contracts.parity import ParityKeys, compare
from scope_contracts.preflight import preflight
from scope_contracts.tensor_spec import DType, TensorSpec
from scope_contracts.tp_names import CANONICAL_BY_TP, from_tp, to_tp
from scope_contracts.wire import MAX_MESSAGE_BYTES, decode_envelope, decode_result, encode

__all__ = [
    "CANONICAL_BY_TP",
    "CONDITIONING_EMBEDS",
    "CONTEXT_FRAMES_OVERRIDE",
    "ENVELOPE_VERSION",
    "INPUT_TENSORS",
    "LATENTS_IN",
    "LATENTS_OUT",
    "MAX_MESSAGE_BYTES",
    "PATCH_SIZE",
    "CacheError",
    "CacheIndices",
    "CacheState",
    "CallCountError",
    "ChunkGeometry",
    "ContractError",
    "DType",
    "EpochError",
    "FieldError",
    "KVCacheSpec",
    "Lifecycle",
    "LifecycleError",
    "LinkError",
    "LinkTimeoutError",
    "MessageKind",
    "OrderError",
    "PPEnvelope",
    "PPResult",
    "ParityError",
    "ParityKeys",
    "PeerLostError",
    "PlanId",
    "PreflightError",
    "ScopeError",
    "StartFrameError",
    "TensorSpec",
    "UserInputError",
    "VersionError",
    "WireError",
    "compare",
    "decode_envelope",
    "decode_result",
    "encode",
    "from_tp",
    "preflight",
    "shutdown_envelope",
    "to_tp",
]
