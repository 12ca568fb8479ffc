"""Every check of a running stream is a function that is handed in, all of them real by default.

The runtime calls `instruments.checks.NAME(...)` and knows no way round it. That a check matters is
shown from outside: the break-it suite hands in one function that does nothing in place of a real
one, and sees the fault of that check get through.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from scope_contracts.answer import check_answer, check_state
from scope_contracts.arithmetic import (
    Deviation,
    ReducedSum,
    check_canary,
    check_deviation,
    check_sums,
    check_written_rows,
)
from scope_contracts.call_budget import CallBudget
from scope_contracts.envelope import PPEnvelope, PPResult
from scope_contracts.errors import DigestError, SlowRankError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.integrity import (
    Emitted,
    check_derived,
    check_emitted,
    check_kept,
    check_numerics,
    check_planned,
    check_replicated,
    check_rows,
)
from scope_contracts.lifecycle import Lifecycle
from scope_contracts.parity import (
    ParityKeys,
    ScalarDigest,
    compare,
    compare_digests,
    compare_numerics,
)
from scope_contracts.preflight import preflight as check_envelope
from scope_contracts.tensor_spec import TensorSpec
from scope_contracts.weights import Checksums, check_loaded, check_unchanged
from scope_rt.values import check_decoded, check_latents


class _StateCheck(Protocol):
    def __call__(self, envelope: PPEnvelope, *, ran: bytes, planned: bytes) -> None: ...


class _NumericsCheck(Protocol):
    def __call__(
        self, rank: int, chunk: int, *, now: Sequence[str], at_start: Sequence[str]
    ) -> None: ...


class _LatentsCheck(Protocol):
    def __call__(
        self, chunk: int, latents_BFCHW: Tensor, *, repeats: bool, limit: float | None
    ) -> None: ...


class _KeptCheck(Protocol):
    def __call__(self, where: str, what: str, *, now: str, noted: str) -> None: ...


class _PlannedCheck(Protocol):
    def __call__(self, chunk: int, what: str, *, got: object, asked: object) -> None: ...


class _EmittedCheck(Protocol):
    def __call__(
        self, chunk: Emitted, *, decoded: Emitted | None, before: Emitted | None
    ) -> None: ...


class _InputDigestCheck(Protocol):
    def __call__(
        self,
        where: str,
        peer: str,
        *,
        sent: Mapping[str, bytes],
        arrived: Mapping[str, bytes],
    ) -> None: ...


class _RowsCheck(Protocol):
    def __call__(self, where: str, plane: str, got: float, want: float, bound: float) -> None: ...


def is_superseded(result_epoch: int, first_epoch: int) -> bool:
    """Whether a result is of an epoch that a hard cut has ended; it is dropped then."""
    return result_epoch < first_epoch


def check_input_digests(
    where: str, peer: str, *, sent: Mapping[str, bytes], arrived: Mapping[str, bytes]
) -> None:
    """Compare what arrived from `peer` with the digests it sent along.

    Raises:
        DigestError: naming what differs.
    """
    for name, want in sent.items():
        if arrived[name] != want:
            raise DigestError(
                f"{where}: {name} from {peer}: got digest {arrived[name].hex()}, sent was "
                f"{want.hex()}"
            )


def check_pace(
    chunk: int, busy_ms: Sequence[float], ranks: Sequence[int], slow_factor: float
) -> None:
    """Compare how long each of `ranks` computes a chunk; 0 is not known yet.

    Raises:
        SlowRankError: naming the slowest, where it takes `slow_factor` times the fastest one's.
    """
    slowest, fastest = max(busy_ms), min(busy_ms)
    if slowest > slow_factor * fastest > 0:
        rank = ranks[busy_ms.index(slowest)]
        raise SlowRankError(
            f"chunk {chunk}: rank {rank} computes {slowest:.0f} ms a chunk where {fastest:.0f} "
            f"ms are usual; more than "
            f"slow_rank_factor (SCOPE_SLOW_RANK_FACTOR) = {slow_factor:g} times"
        )


def _run(start: Callable[[], None]) -> None:
    start()


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """One function per check; each raises the error that its function names."""

    settings: Callable[[Sequence[ParityKeys]], None] = compare
    """All ranks, before the first model collective: were they started alike?"""
    loaded_weights: Callable[[Mapping[int, Checksums], Checksums, Callable[[str], bool]], None] = (
        check_loaded
    )
    """All ranks, after loading: do they hold the checkpoint's weights?"""
    weights: Callable[[int, int, Sequence[str]], None] = check_unchanged
    """A generator rank, in rotation: does it still hold what it loaded?"""
    derived: Callable[[int, int, Sequence[str]], None] = check_derived
    """The same, of what it computed once and uses for many chunks."""
    rows: Callable[[int, int, Sequence[tuple[int, int]]], None] = check_rows
    """The same, of its cache: does it still hold what was written?"""
    replicated: Callable[[int, Sequence[str], Sequence[int]], None] = check_replicated
    """The generator ranks, after every chunk: did all compute the same result?"""
    numerics: _NumericsCheck = check_numerics
    """A generator rank, before every chunk: are its numeric settings those of its start?"""
    heartbeat: Callable[[Callable[[], None]], None] = _run
    """Every rank, once connected: starts the thread that names a rank which stops answering."""
    preflight: Callable[[PPEnvelope, Mapping[str, TensorSpec], ChunkGeometry], None] = (
        check_envelope
    )
    """Rank0 before it sends, the mesh before it receives tensors: is the envelope whole?"""
    enter: Callable[[Lifecycle, PPEnvelope], Lifecycle] = Lifecycle.enter
    """Every rank: may this envelope come after those before it?"""
    count_call: Callable[[CallBudget], None] = CallBudget.enter
    """A generator rank, before every generator call: was this call planned?"""
    commit: Callable[[Lifecycle, int], Lifecycle] = Lifecycle.commit
    """A generator rank, after a chunk: did it make as many calls as planned?"""
    scalars: Callable[[Sequence[ScalarDigest], Sequence[int]], None] = compare_digests
    """The generator ranks, every N chunks: are they about to run the same chunk?"""
    same_numerics: Callable[[Sequence[Sequence[str]], Sequence[int]], None] = compare_numerics
    """The generator ranks, every N chunks: do they compute under the same numeric settings?"""
    pace: Callable[[int, Sequence[float], Sequence[int], float], None] = check_pace
    """The generator ranks, every N chunks: is one far slower than the others?"""
    arithmetic: Callable[[Deviation], None] = check_deviation
    """A generator rank, after a chunk: did tokens come out as other code computes them?"""
    linear_sums: Callable[[Deviation], None] = check_deviation
    """A generator rank, after a chunk: are products those of the weights that were loaded?"""
    edges: Callable[[Deviation], None] = check_deviation
    """A generator rank, after a chunk: is what enters and leaves the blocks what was planned?"""
    noise: Callable[[Deviation], None] = check_deviation
    """A generator rank, after a chunk: is all noise that of seed, epoch, chunk and step?"""
    made: Callable[[Deviation], None] = check_deviation
    """A generator rank, after a chunk: were text K/V and modulations made as in float64?"""
    cached_rows: _RowsCheck = check_written_rows
    """A generator rank, after a chunk: are cached rows those that were given to the cache?"""
    reduced_sums: Callable[[int, Sequence[Sequence[ReducedSum]], Sequence[int]], None] = check_sums
    """The generator ranks, after a chunk: did all-reduces give the sum of what they were given?"""
    canary: Callable[[int, Sequence[str], Sequence[int], str], None] = check_canary
    """The generator ranks, at a start and every N chunks: is a fixed chunk what it always was?"""
    input_digests: _InputDigestCheck = check_input_digests
    """The receiver of a message with digests: did it arrive as it was sent?"""
    answer: Callable[[PPEnvelope, PPResult], None] = check_answer
    """Rank0: does this result answer the envelope it should?"""
    state: _StateCheck = check_state
    """Rank0: was the result made from the planned scalars, on the planned cache?"""
    latents: _LatentsCheck = check_latents
    """Rank0: could a model have computed these latents?"""
    planned: _PlannedCheck = check_planned
    """Rank0, before it sends: is the plan what was asked for?"""
    kept: _KeptCheck = check_kept
    """Rank0: are latents, context and embeddings still what they were when they were made?"""
    decoded: Callable[[int, Tensor, Tensor], None] = check_decoded
    """Rank0: does a second decoder give the same frames?"""
    codec: _KeptCheck = check_kept
    """Rank0, at a start and every N chunks: does its codec show fixed latents as it always did?"""
    text: _KeptCheck = check_kept
    """Rank0, for a prompt and every N chunks: does its text encoder give the same embeddings?"""
    emitted: _EmittedCheck = check_emitted
    """Rank0: is what it hands out what it decoded, in order and once?"""
    is_dropped: Callable[[int, int], bool] = is_superseded
    """Rank0: was the result's epoch ended by a hard cut, so that it must not be shown?"""
