"""Which token is recomputed follows from the chunk alone, so all ranks look at the same one."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from scope_contracts.envelope import PPEnvelope


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """What one generator call must do, as its envelope says it."""

    first_frame: int
    """Position of its first latent frame in the cache's timeline."""
    num_frames: int
    rows: int
    columns: int
    """Tokens of a frame."""
    log_bias: float = 0.0
    """Added to the scores of past frames."""
    block_frames: int = 0
    """Frames that see each other in a recompute; 0 where all keys are visible to all."""

    @property
    def num_tokens(self) -> int:
        return self.num_frames * self.rows * self.columns

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
) -> list[CallPlan]:
    """The calls of a chunk of `num_frames` of `grid` tokens, in order.

    `origin_frame` is the frame of the epoch at position 0, `num_context` the frames that a
    recompute sees, 0 where there is none.
    """
    rows, columns = grid
    first = envelope.current_start_frame - origin_frame
    log_bias = math.log(envelope.kv_cache_attention_bias)
    plain = CallPlan(first_frame=first, num_frames=num_frames, rows=rows, columns=columns)
    biased = CallPlan(
        first_frame=first, num_frames=num_frames, rows=rows, columns=columns, log_bias=log_bias
    )
    rebuilt = CallPlan(
        first_frame=0, num_frames=num_context, rows=rows, columns=columns, block_frames=num_frames
    )
    steps = [biased] * len(envelope.denoising_step_list)
    return [rebuilt] * bool(num_context) + steps + [plain] * envelope.clean_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """One token of one call in one layer."""

    call: int
    layer: int
    batch: int
    token: int


def audits_of(
    chunk: int, *, num_layers: int, calls: list[CallPlan], batch: int, is_strict: bool
) -> Iterator[Audit]:
    """One token of every call and layer where `is_strict`, else the one whose turn it is.

    Turns go through the layers, then through the calls: every (layer, call) has one within
    `num_layers * len(calls)` chunks in a row of that many calls, and every token of it within as
    many times the tokens. Where only some chunks have a recompute, those that have one take turns
    by the same rule, in more chunks.
    """
    num_pairs = num_layers * len(calls)
    visit, turn = divmod(chunk, num_pairs)
    for pair in range(num_pairs) if is_strict else [turn]:
        call, layer = divmod(pair, num_layers)
        number = visit + 31 * (chunk if is_strict else turn) + 7 * layer
        token = number % calls[call].num_tokens
        yield Audit(call=call, layer=layer, batch=chunk % batch, token=token)
