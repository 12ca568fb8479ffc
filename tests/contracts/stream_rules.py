"""The rules of a stream, written down a second time and in plain words, to check the machine by.

Nothing here is taken from the code that it checks: no preflight, no lifecycle.
"""

from dataclasses import dataclass, replace

from scope_contracts import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    LATENTS_IN,
    EpochError,
    LifecycleError,
    MessageKind,
    OrderError,
    PlanId,
    PPEnvelope,
    PreflightError,
    ScopeError,
    StartFrameError,
    TensorSpec,
)

PLAN = PlanId.PP0
BLOCK, MOST_CONTEXT, HEIGHT, WIDTH = 3, 5, 16, 32
STEPS = (1000.0, 937.5, 833.25, 625.0)


def announced(envelope: PPEnvelope) -> tuple[TensorSpec, ...]:
    """The tensors that its bits call for, and no other."""
    if envelope.kind is MessageKind.SHUTDOWN:
        return ()
    rows, columns = envelope.height // 8, envelope.width // 8
    tensors = [TensorSpec(LATENTS_IN, "float32", (1, BLOCK, 4, rows, columns))]  # type: ignore[arg-type]
    if envelope.init_cache or envelope.reset_crossattn_cache:
        tensors.append(_conditioning())
    if envelope.do_kv_recompute:
        frames = min(MOST_CONTEXT, envelope.current_start_frame)
        context = replace(tensors[0], name=CONTEXT_FRAMES_OVERRIDE)
        tensors.append(replace(context, shape=(1, frames, 4, rows, columns)))
    return tuple(tensors)


def with_conditioning(envelope: PPEnvelope) -> tuple[TensorSpec, ...]:
    """What its bits call for, and conditioning beside it, which is always allowed."""
    rest = [t for t in announced(envelope) if t.name != CONDITIONING_EMBEDS]
    return (rest[0], _conditioning(), *rest[1:])


def _conditioning() -> TensorSpec:
    return TensorSpec(CONDITIONING_EMBEDS, "float32", (1, 6, 8))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Where a stream stands after its last whole chunk."""

    call: int = -1
    chunk: int = -1
    epoch: int = -1
    start: int = 0
    end_of_cache: int = 0
    has_cache: bool = False
    is_over: bool = False
    start_frame: bool = False
    """Whether chunk 0 is a picture."""

    def after(self, e: PPEnvelope) -> "Stream":
        """Where it stands once `e` is done."""
        if e.kind is MessageKind.SHUTDOWN:
            return replace(self, call=e.call_id, is_over=True)
        rebuilt = min(MOST_CONTEXT, e.current_start_frame) if e.do_kv_recompute else None
        kept = 0 if e.init_cache else self.end_of_cache if rebuilt is None else rebuilt
        return Stream(
            call=e.call_id,
            chunk=e.chunk_index,
            epoch=e.cache_epoch,
            start=e.current_start_frame + BLOCK,
            end_of_cache=kept + BLOCK,
            has_cache=True,
            start_frame=self.start_frame,
        )

    def restarted(self) -> "Stream":
        """Its ranks were started again."""
        return replace(self, end_of_cache=0, has_cache=False, is_over=False)

    def objection(self, e: PPEnvelope) -> type[ScopeError] | None:
        """Why `e` may not come next; None if it may."""
        if not is_sound(e, start_frame=self.start_frame):
            return PreflightError
        if e.plan_id != PLAN:
            return LifecycleError
        if self.is_over or e.call_id != self.call + 1:
            return OrderError
        if e.kind is MessageKind.SHUTDOWN:
            return None
        if e.init_cache:
            return self._objection_to_cut(e)
        if self.epoch < 0 or e.cache_epoch != self.epoch or e.reset_kv_cache:
            return EpochError
        if not self.has_cache and not (e.do_kv_recompute and e.reset_crossattn_cache):
            return LifecycleError
        if e.chunk_index != self.chunk + 1:
            return OrderError
        return None if e.current_start_frame == self.start else StartFrameError

    def _objection_to_cut(self, e: PPEnvelope) -> type[ScopeError] | None:
        if e.cache_epoch != self.epoch + 1:
            return EpochError
        return None if e.chunk_index > self.chunk else OrderError


def is_sound(e: PPEnvelope, *, start_frame: bool) -> bool:
    """Whether there is a place for `e` in some stream, or some that begins with a picture."""
    ids = (e.call_id, e.chunk_index, e.cache_epoch, e.base_seed, e.current_start_frame)
    if min(ids) < 0:
        return False
    if e.kind is MessageKind.SHUTDOWN:
        return _has_no_work(e)
    steps = e.denoising_step_list
    falls = list(steps) == sorted(set(steps), reverse=True)
    calls = len(steps) + (1 if e.clean_pass else 0) + (1 if e.do_kv_recompute else 0)
    cut_is_whole = e.reset_kv_cache and e.reset_crossattn_cache and e.current_start_frame == 0
    is_picture = start_frame and e.chunk_index == 0
    if is_picture and (steps or not (e.init_cache and e.clean_pass)):
        return False
    return (
        len(steps) == e.num_denoise_steps
        and bool(steps) != is_picture
        and falls
        and all(0 < step <= 1000 for step in steps)
        and e.expected_generator_calls == calls
        and 0 < e.kv_cache_attention_bias <= 1
        and all(size > 0 and size % 16 == 0 for size in (e.height, e.width))
        and (cut_is_whole or not e.init_cache)
        and not (e.do_kv_recompute and (e.init_cache or e.current_start_frame == 0))
        and e.tensors in (announced(e), with_conditioning(e))
    )


def _has_no_work(e: PPEnvelope) -> bool:
    bits = (
        *(e.init_cache, e.reset_kv_cache, e.reset_crossattn_cache),
        *(e.do_kv_recompute, e.clean_pass),
    )
    counts = (
        *(e.current_start_frame, e.num_denoise_steps, e.expected_generator_calls),
        *(e.height, e.width, e.base_seed),
    )
    lists = (e.denoising_step_list, e.tensors)
    return not any((*bits, *counts, *lists)) and e.kv_cache_attention_bias == 1
