"""The cache advances only by whole chunks, in order, and resets only at an epoch boundary.

`Lifecycle` is a value: `enter` and `commit` return the next one, and an illegal step raises
and changes nothing. Every rank steps its own copy and so reaches the same state.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from scope_contracts.envelope import CONTEXT_FRAMES_OVERRIDE, MessageKind, PlanId, PPEnvelope
from scope_contracts.errors import (
    CallCountError,
    EpochError,
    LifecycleError,
    OrderError,
    StartFrameError,
    mismatch,
)


class CacheState(StrEnum):
    """What the cache is going through."""

    WARM_UP = "warm_up"
    """Not ready: what is in it is no part of the stream, and no chunk may enter."""
    RESET = "reset"
    """Empty: nothing entered yet, or the open chunk is the first of its epoch."""
    STEADY = "steady"
    """The open chunk appends to the cache."""
    RECOMPUTE = "recompute"
    """The open chunk rebuilds the cache from its context first, then appends."""
    ADVANCE = "advance"
    """The last chunk is committed; the next one may enter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """The last committed ids of a stream; the defaults stand before its first chunk.

    `next_start_frame` is in latent frames of the epoch.
    """

    call_id: int = -1
    chunk_index: int = -1
    cache_epoch: int = -1
    next_start_frame: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """Where a stream's cache stands; the defaults stand before the first chunk of a stream.

    `next_start_frame` is in latent frames of the epoch, `cache_end_frame` in latent frames since
    the cache was last rebuilt: the two part where a recompute re-bases the cache. `call_budget` is
    the open chunk's number of generator calls, or None while no chunk is open.
    """

    plan_id: PlanId
    frames_per_block: int
    recaches: bool = False
    """Whether a recompute on ranks that hold a cache makes it again where it lies."""
    state: CacheState = CacheState.RESET
    call_id: int = -1
    chunk_index: int = -1
    cache_epoch: int = -1
    next_start_frame: int = 0
    cache_end_frame: int = 0
    call_budget: int | None = None
    holds_cache: bool = False
    """Whether there is anything in the cache; if not, a hard cut or a recompute must come first."""
    is_shut_down: bool = False

    @classmethod
    def resumed(
        cls,
        *,
        plan_id: PlanId,
        frames_per_block: int,
        position: StreamPosition,
        recaches: bool = False,
    ) -> "Lifecycle":
        """Where ranks stand that were started again: they know the ids, and hold no cache."""
        return cls(
            plan_id=plan_id,
            frames_per_block=frames_per_block,
            recaches=recaches,
            call_id=position.call_id,
            chunk_index=position.chunk_index,
            cache_epoch=position.cache_epoch,
            next_start_frame=position.next_start_frame,
        )

    def warming_up(self) -> "Lifecycle":
        """Before the ranks are ready: nothing may enter until `ready`."""
        return replace(self, state=CacheState.WARM_UP)

    def ready(self) -> "Lifecycle":
        """The cache is empty again, and the stream's first chunk may enter.

        Raises `OrderError` where it was not warming up.
        """
        if self.state is not CacheState.WARM_UP:
            raise OrderError(mismatch("ready: state", got=str(self.state), want="warm_up"))
        return replace(self, state=CacheState.RESET)

    def enter(self, envelope: PPEnvelope) -> "Lifecycle":
        """Open the chunk that `envelope` plans, or shut down.

        Raises `OrderError`, `EpochError` or `StartFrameError` when it may not come now, and
        `LifecycleError` when it belongs to another plan.
        """
        self._check_order(envelope)
        if envelope.kind is MessageKind.INFER:
            self._check_epoch(envelope)
            self._check_cache(envelope)
            self._check_chunk(envelope)
        return self.follow(envelope)

    def follow(self, envelope: PPEnvelope) -> "Lifecycle":
        """The state once `envelope` is entered, without a check: for `enter` and disarmed tests."""
        if envelope.kind is MessageKind.SHUTDOWN:
            return replace(self, call_id=envelope.call_id, is_shut_down=True)
        return replace(
            self,
            state=_state_of(envelope),
            call_id=envelope.call_id,
            chunk_index=envelope.chunk_index,
            cache_epoch=envelope.cache_epoch,
            next_start_frame=envelope.current_start_frame,
            cache_end_frame=self._rebased(envelope),
            call_budget=envelope.expected_generator_calls,
            holds_cache=True,
        )

    def commit(self, observed_generator_calls: int) -> "Lifecycle":
        """Close the open chunk and advance by one block.

        Raises `CallCountError` when the generator ran more or fewer calls than planned, and
        `OrderError` when no chunk is open.
        """
        if self.call_budget is None:
            raise OrderError("commit: got no open chunk, want one; enter its envelope first")
        if observed_generator_calls != self.call_budget:
            field = f"chunk {self.chunk_index}: generator calls"
            raise CallCountError(
                mismatch(field, got=observed_generator_calls, want=self.call_budget)
            )
        return replace(
            self,
            state=CacheState.ADVANCE,
            next_start_frame=self.next_start_frame + self.frames_per_block,
            cache_end_frame=self.cache_end_frame + self.frames_per_block,
            call_budget=None,
        )

    def _rebased(self, envelope: PPEnvelope) -> int:
        """The cache's end when the chunk begins: a recompute leaves it at the length of its
        context, unless it makes in place what is held."""
        if envelope.reset_kv_cache:
            return 0
        if not envelope.do_kv_recompute or (self.recaches and self.holds_cache):
            return self.cache_end_frame
        contexts = [spec for spec in envelope.tensors if spec.name == CONTEXT_FRAMES_OVERRIDE]
        return contexts[0].shape[1] if contexts and len(contexts[0].shape) > 1 else 0

    def _check_order(self, envelope: PPEnvelope) -> None:
        where = f"call {envelope.call_id}"
        if envelope.plan_id is not self.plan_id:
            field, got = f"{where}: plan_id", str(envelope.plan_id)
            raise LifecycleError(mismatch(field, got=got, want=str(self.plan_id)))
        if self.state is CacheState.WARM_UP:
            raise OrderError(f"{where}: got an envelope before the rank is ready, want none")
        if self.is_shut_down:
            raise OrderError(f"{where}: got an envelope after shutdown, want none")
        if self.call_budget is not None:
            raise OrderError(
                f"{where}: got it while chunk {self.chunk_index} is open, want a commit"
            )
        if envelope.call_id != self.call_id + 1:
            raise OrderError(mismatch("call_id", got=envelope.call_id, want=self.call_id + 1))

    def _check_epoch(self, envelope: PPEnvelope) -> None:
        where = f"chunk {envelope.chunk_index}"
        epoch = self.cache_epoch + 1 if envelope.init_cache else self.cache_epoch
        if epoch < 0:
            raise EpochError(f"{where}: got init_cache False, want True before the first chunk")
        if envelope.cache_epoch != epoch:
            fix = "a hard cut is init_cache and one more epoch, together"
            field = f"{where}: cache_epoch with init_cache {envelope.init_cache}"
            raise EpochError(mismatch(field, got=envelope.cache_epoch, want=epoch, fix=fix))
        if envelope.reset_kv_cache != envelope.init_cache:
            field, want = (
                f"{where}: reset_kv_cache",
                f"the same as init_cache {envelope.init_cache}",
            )
            raise EpochError(mismatch(field, got=envelope.reset_kv_cache, want=want))
        if envelope.init_cache and not envelope.reset_crossattn_cache:
            field = f"{where}: reset_crossattn_cache"
            raise EpochError(mismatch(field, got=False, want="True with init_cache"))
        if envelope.init_cache and envelope.do_kv_recompute:
            field, want = f"{where}: do_kv_recompute", "False with init_cache: there is no context"
            raise EpochError(mismatch(field, got=True, want=want))

    def _check_cache(self, envelope: PPEnvelope) -> None:
        """Ranks that were started again hold neither keys of the past nor text."""
        if self.holds_cache or envelope.init_cache:
            return
        for name, bit in (
            ("do_kv_recompute", envelope.do_kv_recompute),
            ("reset_crossattn_cache", envelope.reset_crossattn_cache),
        ):
            if not bit:
                field = f"chunk {envelope.chunk_index}: {name} on ranks that hold no cache"
                raise LifecycleError(mismatch(field, got=False, want="True, or a hard cut"))

    def _check_chunk(self, envelope: PPEnvelope) -> None:
        chunk, following = envelope.chunk_index, self.chunk_index + 1
        if chunk < following or (chunk > following and not envelope.init_cache):
            want = f"at least {following}" if envelope.init_cache else following
            raise OrderError(mismatch("chunk_index", got=chunk, want=want))
        start = 0 if envelope.init_cache else self.next_start_frame
        if envelope.current_start_frame != start:
            field = f"chunk {chunk}: current_start_frame"
            raise StartFrameError(mismatch(field, got=envelope.current_start_frame, want=start))


def _state_of(envelope: PPEnvelope) -> CacheState:
    if envelope.init_cache:
        return CacheState.RESET
    return CacheState.RECOMPUTE if envelope.do_kv_recompute else CacheState.STEADY
