"""Every token of a block is computed again, from the block's input to its output.

Each stage starts from what was observed before it (the block's input, what linear layers, attention
and each all-reduce gave), so the first stage that differs is where the fault is. Nothing of the
model's own code is called. A stage compares two sums over each token's channels, weighted by
`signs`: a number that is off by more than its token's rounding moves them, wherever it is. What is
linear (products, gates, residuals, means) needs no other numbers than such sums.

Shape legend: R calls of blocks, N tokens, K sums.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.block_record import BlockRecord
from scope_rt.integrity.block_sums import ProductSums, walk
from scope_rt.integrity.call_weights import Affine, BlockWeights, Gate, Seen, stacked
from scope_rt.integrity.linear_sums import NUM_SUMS
from scope_rt.integrity.oracle_attention import attention_sums, text_attended
from scope_rt.integrity.tolerance import SHARED, SQUARES_ROUNDOFF, Rounding


class Stage(NamedTuple):
    """Sums `[R, N, K]` that were computed twice."""

    name: str
    got: Tensor
    want: Tensor
    bound: Tensor
    is_linear: bool = False
    """Whether it is the sum of a linear layer's products."""


class _Normed(NamedTuple):
    """A layer norm of the residual stream, scaled and shifted, as a linear layer takes it."""

    products: Tensor
    length: Tensor
    """`[R, N, 1]`, as lengths are."""
    error: Tensor
    off: Tensor
    """Relative error of `products` that all share."""


class _Stream(NamedTuple):
    """The residual stream at one place: sums by `signs`, and a token's length."""

    sums: Tensor
    length: Tensor


class BlockAudit:
    """What records of blocks, of calls of as many tokens, are held against."""

    def __init__(
        self, weights: BlockWeights, records: Sequence[BlockRecord], rounding: Rounding
    ) -> None:
        self._weights, self._records, self._rounding = weights, records, rounding
        self._config = weights.config
        self._layers = torch.tensor([each.audit.layer for each in records], device=weights.device)

    def stages(self) -> Iterator[Stage]:
        """Every stage, in the order of computation."""
        weights, calls = self._weights, [record.weights for record in self._records]
        h, stream = self._normed(Seen.INPUT, [call.first_norm for call in calls])
        by_linear = h.products.split(NUM_SUMS, dim=-1)
        yield self._product("to_q", weights.to_q, Seen.Q_PRODUCT, h, by_linear[0])
        yield self._product("to_k", weights.to_k, Seen.K_PRODUCT, h, by_linear[1])
        yield from self._squares(0, (Seen.Q_PRODUCT, Seen.K_PRODUCT))
        yield from self._attention()
        yield self._product("to_v", weights.to_v, Seen.VALUES, h, by_linear[2])
        yield self._plain_product("to_out", weights.to_out, Seen.PROJECTED, Seen.ATTENTION)
        gates = [call.first_gate for call in calls]
        want = self._added(stream, Seen.PROJECTED, gates)
        h, stream = self._normed(Seen.AFTER_ATTENTION, [call.text_norm for call in calls])
        yield Stage("residual of self-attention", stream.sums, *want)
        yield self._product("text to_q", weights.text_to_q, Seen.TEXT_Q_PRODUCT, h, h.products)
        yield from self._squares(1, (Seen.TEXT_Q_PRODUCT,))
        yield self._text()
        error = self._after_text_error()
        second = [call.second_norm for call in calls]
        h, stream = self._normed(Seen.AFTER_TEXT, second, error)
        yield self._product("ffn up", weights.up, Seen.UP, h, h.products)
        yield self._plain_product("ffn down", weights.down, Seen.DOWN, Seen.ACTIVATION)
        value, bound = self._added(stream, Seen.DOWN, [call.second_gate for call in calls])
        yield Stage("block output", self._sums(Seen.OUTPUT), value, bound + error)

    def _sums(self, what: Seen) -> Tensor:
        return torch.stack([record.sums[what] for record in self._records])

    def _lengths(self, what: Seen) -> Tensor:
        return torch.stack([record.lengths[what] for record in self._records])[..., None]

    def _normed(
        self, what: Seen, norms: Sequence[Affine], x_error: Tensor | None = None
    ) -> tuple[_Normed, _Stream]:
        """Four numbers are stored on the way, none larger than what x and its mean make of one."""
        sums, length, rounding = self._sums(what), self._lengths(what), self._rounding
        of, num = stacked(norms), self._config.dim
        by_weight, stream, mean = sums.split((sums.shape[-1] - NUM_SUMS - 1, NUM_SUMS, 1), dim=-1)
        squares = length * length
        spread = (squares - num * mean * mean).clamp_min_(0) + num * self._config.eps
        root = (spread / num).rsqrt_()
        products = root * (by_weight - mean * of["mean_sums_1K"])
        scaled = of["largest_11"] * root
        side = math.sqrt(num)
        error = (4 * rounding.store + 3 * LAMBDA * rounding.work) * (
            scaled * (length + side * mean.abs()) + of["shift_11"]
        )
        if x_error is not None:
            error = error + 2 * scaled * x_error
        off = (LAMBDA * rounding.work * side) * squares / spread
        normed = _Normed(
            products + of["shift_sums_1K"], scaled * length + of["shift_11"], error, off
        )
        return normed, _Stream(stream, length)

    def _product(
        self, name: str, linear: ProductSums, what: Seen, h: _Normed, products: Tensor
    ) -> Stage:
        stage = self._held(name, linear, what, products, h.length, h.error)
        return stage._replace(bound=stage.bound + h.off * products.abs())

    def _plain_product(self, name: str, linear: ProductSums, what: Seen, before: Seen) -> Stage:
        """Of what is known to a few roundings."""
        error = None
        length = self._lengths(Seen.UP if before is Seen.ACTIVATION else before)
        if before is Seen.ACTIVATION:
            error = (self._rounding.store + 2 * SHARED * self._rounding.work) * length
        return self._held(name, linear, what, self._sums(before), length, error)

    def _held(
        self,
        name: str,
        linear: ProductSums,
        what: Seen,
        products: Tensor,
        length: Tensor,
        error: Tensor | None,
    ) -> Stage:
        got = self._sums(what)[..., :NUM_SUMS]
        bound = linear.bound(
            self._layers,
            got=got,
            y=self._lengths(what),
            x=length,
            x_error=error,
            rounding=self._rounding,
        )
        want = products + linear.bias_sums_LK[self._layers][:, None]
        return Stage(f"sum of {name}", got, want, bound, is_linear=True)

    def _rows_of_squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """`[R, N, projections]`."""
        rows = torch.stack([each.view(each.shape[0], -1) for each in tensors]).transpose(1, 2)
        row = self._records[0].row
        rows = rows if row is None else rows[:, row : row + 1]
        return rows.to(self._weights.dtype)

    def _squares(self, number: int, products: Sequence[Seen]) -> Iterator[Stage]:
        given = self._rows_of_squares([record.squares[number][0] for record in self._records])
        off = 2 * LAMBDA * math.sqrt(self._weights.to_q.rows) + 8
        for index, what in enumerate(products):
            want = self._lengths(what) ** 2
            name = f"sum of squares of {what.value}"
            yield Stage(name, given[..., index : index + 1], want, off * SQUARES_ROUNDOFF * want)

    def _roots(self, number: int) -> Tensor:
        got = self._rows_of_squares([record.squares[number][1] for record in self._records])
        return (got / self._config.dim + self._config.eps).rsqrt_()

    def _attention(self) -> Iterator[Stage]:
        weights, records = self._weights, self._records
        roots = self._roots(0)
        for index, (name, product, norm) in enumerate(
            (
                ("to_q", Seen.Q_PRODUCT, weights.norm_q),
                ("to_k", Seen.K_PRODUCT, weights.norm_k),
            )
        ):
            root = roots[..., index : index + 1]
            want = root * self._sums(product)[..., NUM_SUMS : NUM_SUMS + 1]
            largest = norm[self._layers].abs().amax(-1)[:, None, None]
            bound = self._turned_bound(want, root * self._lengths(product) * largest)
            got = torch.stack([record.turned_sums[index] for record in records])[..., None]
            yield Stage(f"{name}, normed and rotated", got, want, bound)
        got = torch.stack([_known(record.attention_sums).flatten(1) for record in records])
        made = [record.attended for record in records if record.attended is not None]
        want, bound = attention_sums(
            made,
            self._config.attention_head_dim,
            rounding=self._rounding,
            is_half=weights.is_half,
        )
        yield Stage("self-attention", got, want, bound)

    def _turned_bound(self, want: Tensor, size: Tensor) -> Tensor:
        """Three roundings of each number, then four of each pair; one of all numbers' factor."""
        rounding = self._rounding
        store = rounding.store + 8 * SQUARES_ROUNDOFF
        bound = (8 * store + 2 * LAMBDA * rounding.work) * size + store * want.abs()
        return bound + 2 * walk(self._weights.to_q.rows, want, size, rounding.work)

    def _added(self, stream: _Stream, what: Seen, gates: Sequence[Gate]) -> tuple[Tensor, Tensor]:
        """Sums of the stream once a gated step is added to it, and their bound."""
        of, rounding, num = stacked(gates), self._rounding, self._config.dim
        step = torch.stack([record.got_sums[what] for record in self._records])[..., NUM_SUMS:]
        length = torch.stack([record.got_lengths[what] for record in self._records])[..., None]
        value = stream.sums + step + of["bias_sums_1K"]
        size = (length + of["bias_11"]) * of["largest_11"]
        both = size + stream.length
        bound = 3 * rounding.store * both
        bound = bound + walk(
            num, stream.sums.abs() + step.abs() + value.abs(), 3 * both, rounding.work
        )
        return value, bound

    def _after_text_error(self) -> Tensor:
        what = Seen.TEXT_PROJECTED
        step = torch.stack([record.got_lengths[what] for record in self._records])[..., None]
        return 2 * self._rounding.store * (step + self._lengths(Seen.AFTER_TEXT))

    def _text(self) -> Stage:
        records, batch = self._records, self._records[0].audit.batch
        scores = torch.stack([_known(record.text_scores) for record in records])
        lengths = torch.stack([_known(record.text_lengths) for record in records])
        of = stacked([record.text_weights for record in records])
        if batch is not None:
            at = slice(batch, batch + 1)
            of = {name: x[:, at] if name.count("BH") else x for name, x in of.items()}
        root = self._roots(1).view(len(records), scores.shape[1], 1, -1, 1)
        sums, bound, error = text_attended(
            scores * root, lengths * root, of, rounding=self._rounding
        )
        linear = self._weights.text_to_out
        length = of["length"]
        stage = self._held("text to_out", linear, Seen.TEXT_PROJECTED, sums, length, error * length)
        return stage._replace(bound=stage.bound + bound)


def _known(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
