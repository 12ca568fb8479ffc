"""Every token of a block is computed again, from the block's input to its output.

Each stage starts from what was observed before it (the block's input, what linear layers, attention
and each all-reduce gave), so the first stage that differs is where the fault is. Nothing of the
model's own code is called. A stage compares two sums over each token's channels, weighted by
`signs`: a number that is off by more than its token's rounding moves them, wherever it is. What is
linear (products, gates, residuals, means) needs no other numbers than such sums.

Shape legend: R calls of blocks, P linear layers of a block, K sums, N tokens.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.block_sums import BlockSums
from scope_rt.integrity.call_weights import LINEARS, Seen
from scope_rt.integrity.linear_sums import NUM_SUMS, walk
from scope_rt.integrity.oracle_attention import attention_sums
from scope_rt.integrity.oracle_text import text_attended
from scope_rt.integrity.tolerance import SHARED, SQUARES_ROUNDOFF, Rounding


class Stage(NamedTuple):
    """Sums `[R, K, N]` that were computed twice."""

    name: str
    got: Tensor
    want: Tensor
    bound: Tensor
    is_linear: bool = False
    """Whether it is the sum of a linear layer's products."""

    def whole(self, name: str) -> Tensor:
        """A field, as large as `got`."""
        x: Tensor = getattr(self, name)
        return x if x.shape == self.got.shape else x.expand_as(self.got)


class _Normed(NamedTuple):
    """Three layer norms of the residual stream, scaled and shifted, as linear layers take them."""

    products_R3KN: Tensor
    length_R31N: Tensor
    error_R31N: Tensor
    off_R31N: Tensor
    """Relative error of `products` that all share."""


class _Product(NamedTuple):
    """Sums of a linear layer's products, but for its bias, as they must be."""

    name: str
    sums: Tensor
    length: Tensor
    """Of what is multiplied."""
    error: Tensor | None = None
    """Length of its error."""
    more: Tensor | None = None
    """How far off the sums may be beside that."""


class BlockAudit:
    """What sums of blocks, of calls of as many tokens, are held against."""

    def __init__(self, seen: BlockSums, rounding: Rounding) -> None:
        self._seen, self._rounding = seen, rounding
        self._config = seen.weights.config

    def stages(self) -> Iterator[Stage]:
        """Every stage, in the order of computation."""
        seen, text_error = self._seen, self._after_text_error()
        h, linear = self._normed(text_error), list[_Product]()
        linear += [self._after_norm(name, h, 0, at) for at, name in enumerate(_OF_FIRST_NORM)]
        linear.append(_Product("to_out", seen.sums[Seen.ATTENTION], seen.lengths[Seen.ATTENTION]))
        linear += [self._after_norm("text to_q", h, 1), self._text()]
        linear += [self._after_norm("ffn up", h, 2), self._activated()]
        products = self._linear_stages(linear)
        stream = seen.of.stream_RSKN[:, :, :NUM_SUMS]
        (first, second), (first_off, second_off) = (x.unbind(1) for x in self._added(stream))
        yield products[Seen.Q_PRODUCT]
        yield products[Seen.K_PRODUCT]
        yield from self._squares(0, (Seen.Q_PRODUCT, Seen.K_PRODUCT))
        yield from self._attention()
        yield products[Seen.VALUES]
        yield products[Seen.PROJECTED]
        yield Stage("residual of self-attention", stream[:, 1], first, first_off)
        yield products[Seen.TEXT_Q_PRODUCT]
        yield from self._squares(1, (Seen.TEXT_Q_PRODUCT,))
        yield products[Seen.TEXT_PROJECTED]
        yield products[Seen.UP]
        yield products[Seen.DOWN]
        yield Stage("block output", stream[:, 3], second, second_off + text_error)

    def _normed(self, text_error: Tensor) -> _Normed:
        """Four numbers are stored on the way, none larger than what x and its mean make of one."""
        of, rounding, num = self._seen.bounds, self._rounding, self._config.dim
        sums, length = self._seen.of.stream_RSKN[:, :3], self._seen.of.stream_lengths_RSN[:, :3]
        mean, by_weight = sums[:, :, NUM_SUMS : NUM_SUMS + 1], sums[:, :, NUM_SUMS + 1 :]
        length = length[:, :, None]
        squares, side = length * length, math.sqrt(num)
        spread = (squares - num * mean * mean).clamp_min_(0).add_(num * self._config.eps)
        root = (spread / num).rsqrt_()
        products = root * (by_weight - mean * of.mean_sums_R3K1)
        scaled = of.scale_R311 * root
        error = (scaled * (length + side * mean.abs())).add_(of.shift_R311)
        error *= 4 * rounding.store + 3 * LAMBDA * rounding.work
        error[:, 2] += 2 * scaled[:, 2] * text_error
        return _Normed(
            products.add_(of.shift_sums_R3K1),
            (scaled * length).add_(of.shift_R311),
            error,
            (LAMBDA * rounding.work * side) * squares / spread,
        )

    def _after_norm(self, name: str, h: _Normed, number: int, at: int = 0) -> _Product:
        products = h.products_R3KN[:, number, at * NUM_SUMS : (at + 1) * NUM_SUMS]
        more = h.off_R31N[:, number] * products.abs()
        return _Product(name, products, h.length_R31N[:, number, 0], h.error_R31N[:, number], more)

    def _activated(self) -> _Product:
        """Of what is known to a few roundings."""
        length = self._seen.lengths[Seen.UP]
        error = (self._rounding.store + 2 * SHARED * self._rounding.work) * length[:, None]
        return _Product("ffn down", self._seen.of.activation_RKN, length, error)

    def _linear_stages(self, products: Sequence[_Product]) -> dict[Seen, Stage]:
        """Those of `LINEARS`, all at once."""
        seen, of = self._seen, self._seen.products
        got = torch.stack([seen.sums[what][:, :NUM_SUMS] for what in LINEARS], dim=1)
        y = torch.stack([seen.lengths[what] for what in LINEARS], dim=1)
        x = torch.stack([each.length.expand_as(y[:, 0]) for each in products], dim=1)
        want = torch.stack([each.sums[:, :NUM_SUMS] for each in products], dim=1)
        want += of.bias_sums_LPK1
        bound = of.of(got=got, y=y[:, :, None], x=x[:, :, None], rounding=self._rounding)
        for number, each in enumerate(products):
            if each.error is not None:
                bound[:, number] += of.largest_LPK1[:, number] * each.error
            if each.more is not None:
                bound[:, number] += each.more
        return {
            what: Stage(f"sum of {product.name}", *numbers, is_linear=True)
            for what, product, numbers in zip(
                LINEARS,
                products,
                zip(got.unbind(1), want.unbind(1), bound.unbind(1), strict=True),
                strict=True,
            )
        }

    def _squares(self, number: int, products: Sequence[Seen]) -> Iterator[Stage]:
        given = self._seen.own(self._seen.squares(number, 0))
        off = (2 * LAMBDA * math.sqrt(self._num_channels) + 8) * SQUARES_ROUNDOFF
        for index, what in enumerate(products):
            want = self._seen.lengths[what][:, None] ** 2
            name = f"sum of squares of {what.value}"
            yield Stage(name, given[:, index : index + 1], want, off * want)

    @property
    def _num_channels(self) -> int:
        """Of this rank's heads."""
        return self._config.attention_head_dim * self._seen.of.lengths_RSHN.shape[2]

    def _roots(self, number: int) -> Tensor:
        got = self._seen.own(self._seen.squares(number, 1))
        return (got / self._config.dim).add_(self._config.eps).rsqrt_()

    def _attention(self) -> Iterator[Stage]:
        seen, root = self._seen, self._roots(0)
        want = root * torch.stack(
            [seen.sums[what][:, NUM_SUMS] for what in (Seen.Q_PRODUCT, Seen.K_PRODUCT)], dim=1
        )
        lengths = [seen.lengths[what] for what in (Seen.Q_PRODUCT, Seen.K_PRODUCT)]
        bound = self._turned_bound(want, root * torch.stack(lengths, dim=1) * seen.bounds.norm_R21)
        turned = (x.split(1, dim=1) for x in (seen.of.turned_RSN, want, bound))
        for what, numbers in zip((Seen.Q, Seen.K), zip(*turned, strict=True), strict=True):
            yield Stage(what.value, *numbers)
        longest = [seen.lengths_by_head(what).amax(-1) for what in (Seen.K, Seen.VALUES)]
        want, bound = attention_sums(
            [record.attended for record in seen.records if record.attended is not None],
            seen.lengths_by_head(Seen.Q),
            (longest[0], longest[1]),
            self._config.attention_head_dim,
            rounding=self._rounding,
            is_half=seen.weights.is_half,
        )
        yield Stage("self-attention", seen.of.heads_RHKN.flatten(1, 2), want, bound)

    def _turned_bound(self, want: Tensor, size: Tensor) -> Tensor:
        """Three roundings of each number, then four of each pair; one of all numbers' factor."""
        rounding = self._rounding
        store = rounding.store + 8 * SQUARES_ROUNDOFF
        bound = 2 * walk(math.sqrt(self._num_channels), want, size, rounding.work)
        bound += (8 * store + 2 * LAMBDA * rounding.work) * size
        return bound.add_(want.abs(), alpha=store)

    def _added(self, stream_RSKN: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of the stream once a gated step is added to it, first that of self-attention, then
        that of the feed-forward: `[R, 2, K, N]`; and their bound."""
        seen, of, rounding = self._seen, self._seen.bounds, self._rounding
        step, length = seen.got[:, ::2, NUM_SUMS:], seen.got_lengths[:, ::2, None]
        before, before_length = stream_RSKN[:, :3:2], seen.of.stream_lengths_RSN[:, :3:2, None]
        value = before + step + of.gated_bias_sums_R2K1
        both = (length + of.gated_bias_R211) * of.gate_R211 + before_length
        sizes = before.abs() + step.abs() + value.abs()
        bound = walk(math.sqrt(self._config.dim), sizes, 3 * both, rounding.work)
        return value, bound.add_(both, alpha=3 * rounding.store)

    def _after_text_error(self) -> Tensor:
        """`[R, 1, N]`."""
        step, stream = self._seen.got_lengths[:, 1:2], self._seen.of.stream_lengths_RSN[:, 2:3]
        return 2 * self._rounding.store * (step + stream)

    def _text(self) -> _Product:
        seen = self._seen
        scores, lengths = seen.of.text_scores_RBHLN, seen.lengths_by_head(Seen.TEXT_Q_PRODUCT)
        root = self._roots(1).view(len(scores), scores.shape[1], 1, 1, -1)
        sums, bound, error = text_attended(
            scores * root, lengths[..., None, :] * root, seen.text, rounding=self._rounding
        )
        length = seen.text.length_R11
        return _Product("text to_out", sums, length[:, 0], error * length, bound)


_OF_FIRST_NORM = ("to_q", "to_k", "to_v")
