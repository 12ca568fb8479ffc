"""Which token is recomputed follows from the chunk alone, so all ranks look at the same one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from scope_contracts.envelope import CONTEXT_FRAMES_OVERRIDE, LATENTS_IN, PPEnvelope


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """What one generator call must do, as its envelope says it."""

    first_frame: int
    """Position of its first latent frame in the cache's timeline."""
    num_frames: int
    rows: int
    columns: int
    """Tokens of a frame."""
    timestep: float = 0.0
    """Of the noise level, in 0..1000; 0 where clean latents go in."""
    log_bias: float = 0.0
    """Added to the scores of past frames."""
    block_frames: int = 0
    """Frames that see each other in a recompute; 0 where all keys are visible to all."""
    is_recompute: bool = False

    @property
    def frame_tokens(self) -> int:
        return self.rows * self.columns

    @property
    def num_tokens(self) -> int:
        return self.num_frames * self.frame_tokens

    def position(self, token: int) -> tuple[int, int, int]:
        """Frame, row and column by which the token is rotated."""
        frame, place = divmod(token, self.rows * self.columns)
        return (self.first_frame + frame, *divmod(place, self.columns))


def calls_of(
    envelope: PPEnvelope,
    *,
    origin_frame: int,
    grid: tuple[int, int],
    num_frames: int,
    num_context: int,
    in_place: bool = False,
) -> list[CallPlan]:
    """The calls of a chunk of `num_frames` of `grid` tokens, in order.

    `origin_frame` is the frame of the epoch at position 0, `num_context` the frames that a
    recompute sees, 0 where there is none; `in_place` are those before the chunk, which see all.
    """
    rows, columns = grid
    first = envelope.current_start_frame - origin_frame
    log_bias = math.log(envelope.kv_cache_attention_bias)
    call = partial(CallPlan, rows=rows, columns=columns)  # a `replace` takes four times as long
    rebuilt = call(
        first_frame=first - num_context if in_place else 0,
        num_frames=num_context,
        block_frames=0 if in_place else num_frames,
        is_recompute=True,
    )
    steps = [
        call(first_frame=first, num_frames=num_frames, timestep=timestep, log_bias=log_bias)
        for timestep in envelope.denoising_step_list
    ]
    plain = call(first_frame=first, num_frames=num_frames)
    return [rebuilt] * bool(num_context) + steps + [plain] * envelope.clean_pass


class CallPlanner:
    """Follows a stream's envelopes, each of which says what calls it needs."""

    def __init__(self, *, recaches: bool = False) -> None:
        self._recaches = recaches
        self._origin_frame = 0
        """The epoch's frame at position 0 of the cache."""
        self._holds_cache = False

    def skip(self, envelope: PPEnvelope) -> None:
        """Nobody asks for the calls of this chunk, the next one, which rebuilds nothing."""
        if envelope.reset_kv_cache:
            self._origin_frame = 0
        self._holds_cache = True

    def calls(self, envelope: PPEnvelope, tensors: Mapping[str, Tensor]) -> list[CallPlan]:
        """Of this chunk, which must be the next one."""
        latents, num_context = tensors[LATENTS_IN], 0
        in_place = self._recaches and self._holds_cache
        self.skip(envelope)
        if envelope.do_kv_recompute:
            num_context = tensors[CONTEXT_FRAMES_OVERRIDE].shape[1]
        if envelope.do_kv_recompute and not in_place:
            self._origin_frame = envelope.current_start_frame - num_context
        return calls_of(
            envelope,
            origin_frame=self._origin_frame,
            grid=(latents.shape[3] // 2, latents.shape[4] // 2),
            num_frames=latents.shape[1],
            num_context=num_context,
            in_place=in_place,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """One token of one call in one layer, or all of them."""

    call: int
    layer: int
    batch: int | None = None
    token: int | None = None


def whole_audits(num_layers: int, num_calls: int) -> list[Audit]:
    """All tokens of every call and layer, in the order in which they are computed."""
    return [
        Audit(call=call, layer=layer) for call in range(num_calls) for layer in range(num_layers)
    ]


def audits_in_turn(
    number: int, *, call: int, plan: CallPlan, num_layers: int, batch: int
) -> list[Audit]:
    """One token of a call, in all layers.

    Numbers in a row go through all batch rows of a token, then through the tokens.
    """
    visit, row = divmod(number, batch)
    token = visit % plan.num_tokens
    return [Audit(call=call, layer=layer, batch=row, token=token) for layer in range(num_layers)]


class CallTurns:
    """Which calls of a chunk are looked at whole: one in turn in one chunk of `every`, and a
    recompute unless one was in the `every` chunks before it.

    So each of n calls beside recomputes has its turn within n x `every` chunks, whichever chunks
    have one; what a recompute does that nobody looked at began less than `every` chunks ago.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._recompute_chunk: int | None = None
        """The last of which the recompute was looked at."""

    def due(self, chunk: int, *, num_calls: int, has_recompute: bool) -> list[int]:
        """By their number in the chunk, of `num_calls`; a recompute is number 0."""
        every, first, last = self._every, int(has_recompute), self._recompute_chunk
        calls: list[int] = []
        if has_recompute and (last is None or chunk - last >= every):
            self._recompute_chunk = chunk
            calls.append(0)
        if every == 1:
            return [*calls, *range(first, num_calls)]
        turn, is_idle = divmod(chunk, every)
        return calls if is_idle else [*calls, first + turn % (num_calls - first)]
