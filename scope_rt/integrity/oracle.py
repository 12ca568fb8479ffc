"""One token of a block is computed again in float64, from the block's input to its output.

Each stage starts from what was observed before it (the block's input, what linear layers, attention
and each all-reduce gave), so the first stage that differs is where the fault is. Nothing of the
model's own code is called: norms, rotation, text attention, GELU and residuals are written out
here, with the bound of what a kernel's rounding may do to them (`tolerance`); linear layers are
held against sums of the weights that were loaded.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from torch import nn

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.linear_sums import LinearSums, to_array
from scope_rt.integrity.oracle_attention import attention_bound, text_attended, turned
from scope_rt.integrity.recorder import BlockRecord
from scope_rt.integrity.tolerance import (
    EXACT,
    SHARED,
    SQUARES_ROUNDOFF,
    Array,
    Rounding,
    Tracked,
)
from scope_rt.models.causal_wan import Block

_SUMMED_OVER_RANKS = ("to_out", "text to_out", "ffn down")
"""Linear layers whose products are summed over the ranks before the bias is added."""


class Stage(NamedTuple):
    """Numbers `[N, n]` of N records that were computed twice."""

    name: str
    got: Array
    want: Array
    bound: Array
    is_linear: bool = False
    """Whether it is the sum of a linear layer's products."""


class _Rows:
    """The numbers of N records, cut out of their flat vectors."""

    def __init__(self, records: Sequence[BlockRecord]) -> None:
        flat = [record.flat().numpy() for record in records]
        self._flat = np.stack(flat) if len(flat) > 1 else flat[0][None]
        self._at = 0

    def take(self, *shape: int) -> Array:
        start = self._at
        self._at = start + prod(shape)
        part = self._flat[:, start : self._at]
        return part if len(shape) == 1 else part.reshape(-1, *shape)


class BlockOracle:
    """Knows a block's weights as they were loaded: matrices by sums, vectors by value."""

    def __init__(self, block: Block, rounding: Rounding) -> None:
        self._config, self._rounding, self._num_ranks = block.config, rounding, block.group.size
        self._is_cuda = block.norm2.weight.is_cuda
        one, two, ffn = block.attn1, block.attn2, block.ffn.net
        linears = {
            "to_q": one.to_q,
            "to_k": one.to_k,
            "to_v": one.to_v,
            "to_out": one.to_out[0],
            "text to_q": two.to_q,
            "text to_out": two.to_out[0],
            "ffn up": ffn[0]["proj"],  # type: ignore[index]
            "ffn down": ffn[2],
        }
        self._linears = {
            name: LinearSums(linear, has_bias=name not in _SUMMED_OVER_RANKS)
            for name, linear in linears.items()
            if isinstance(linear, nn.Linear)
        }
        norms = (one.norm_q, one.norm_k, two.norm_q)
        self._norms = [to_array(norm.weight) for norm in norms]
        self._norm2 = (to_array(block.norm2.weight), to_array(block.norm2.bias))

    def stages(self, records: Sequence[BlockRecord]) -> Iterator[Stage]:
        """Every stage of `records`, in the order in which it is computed."""
        dim, head_dim = self._config.dim, self._config.attention_head_dim
        rows, local = _Rows(records), len(self._norms[0])
        heads = (local // head_dim, head_dim)
        x, mod = rows.take(dim), rows.take(6, dim)
        qkv = [rows.take(*heads) for _ in range(3)]
        attention, own, largest = rows.take(*heads), rows.take(*heads), rows.take(2)
        reduced = []
        for width in (2, dim, 1, dim, dim):
            given = rows.take(width)
            reduced.append((given, rows.take(width) if self._num_ranks > 1 else given))
        products = [rows.take(local) for _ in range(3)]
        up, out = rows.take(len(self._linears["ffn up"].bias)), rows.take(dim)
        yield from self._before_attention(records, (x, mod), qkv, products, reduced[0])
        bound = attention_bound(
            qkv[0],
            own,
            largest,
            keys=[record.keys for record in records],
            rounding=self._rounding,
            is_cuda=self._is_cuda,
        )
        yield _stage("self-attention", attention, Tracked(own, bound))
        yield self._product("to_out", Tracked(_flat(attention), EXACT), reduced[1][0])
        x1 = self._residual(Tracked(x, EXACT), reduced[1][1], "to_out", mod[:, 2])
        yield from self._text(records, x1, products[2], reduced[2:4])
        x2 = self._residual(x1, reduced[3][1], "text to_out", None)
        yield self._product("ffn up", self._affine_norm(x2, 1 + mod[:, 4], mod[:, 3]), up)
        yield self._product("ffn down", self._gelu(up), reduced[4][0])
        yield _stage("block output", out, self._residual(x2, reduced[4][1], "ffn down", mod[:, 5]))

    def _product(self, name: str, x: Tracked, y: Array) -> Stage:
        sums = self._linears[name].sums(x, y, self._rounding)
        return Stage(f"sum of {name}", *sums, is_linear=True)

    def _before_attention(
        self,
        records: Sequence[BlockRecord],
        inputs: tuple[Array, Array],
        qkv: Sequence[Array],
        products: Sequence[Array],
        squares: tuple[Array, Array],
    ) -> Iterator[Stage]:
        x, mod = inputs
        h = self._affine_norm(Tracked(x, EXACT), 1 + mod[:, 1], mod[:, 0])
        positions = [record.plan.position(record.audit.token) for record in records]
        store = self._rounding.store + 8 * SQUARES_ROUNDOFF
        for index, name in enumerate(("to_q", "to_k")):
            given, got = (each[:, index : index + 1] for each in squares)
            yield self._product(name, h, products[index])
            yield _stage(f"sum of squares of {name}", given, self._squares(products[index]))
            normed = self._normed(products[index], got, index)
            shaped = Tracked(*(part.reshape(qkv[index].shape) for part in normed))
            yield _stage(
                f"{name}, normed and rotated", qkv[index], turned(shaped, positions, store)
            )
        yield self._product("to_v", h, _flat(qkv[2]))

    def _text(
        self,
        records: Sequence[BlockRecord],
        x: Tracked,
        product: Array,
        reduced: Sequence[tuple[Array, Array]],
    ) -> Iterator[Stage]:
        yield self._product("text to_q", self._affine_norm(x, *self._norm2), product)
        yield _stage("sum of squares of text to_q", reduced[0][0], self._squares(product))
        q = self._normed(product, reduced[0][1], 2)
        shape = (len(records), -1, self._config.attention_head_dim)
        batch, text = records[0].audit.batch, records[0].text
        k, v = to_array(text.k[batch]), to_array(text.v[batch])
        shaped = Tracked(*(part.reshape(shape) for part in q))
        own = text_attended(shaped, k, v, self._rounding)
        yield self._product("text to_out", own, reduced[1][0])

    def _squares(self, product: Array) -> Tracked:
        value = np.einsum("nj,nj->n", product, product)[:, None]
        return Tracked(value, LAMBDA * product.shape[-1] ** 0.5 * SQUARES_ROUNDOFF * value)

    def _normed(self, product: Array, squares: Array, norm: int) -> Tracked:
        """RMS norm over all heads of all ranks, whose sum of squares was observed."""
        root = 1 / np.sqrt(squares / self._config.dim + self._config.eps)
        value = product * (root * self._norms[norm])
        off = 3 * self._rounding.store + 8 * SQUARES_ROUNDOFF
        return Tracked(value, off * np.abs(value))

    def _affine_norm(self, x: Tracked, factor: Array, shift: Array) -> Tracked:
        """Layer norm, scaled and shifted.

        Four numbers are stored on the way, none larger than what x and its mean make of one.
        """
        num, value, error = x.value.shape[-1], x.value, x.error
        mean = np.add.reduce(value, -1, keepdims=True) / num
        centred = value - mean
        spread = np.einsum("nj,nj->n", centred, centred)[:, None] / num
        root = 1 / np.sqrt(spread + self._config.eps)
        slope = np.abs(factor * root)
        off = 4 * self._rounding.store + LAMBDA * self._rounding.work
        bound = off * (slope * (np.abs(value) + np.abs(mean)) + np.abs(shift))
        if error is not EXACT:
            bound += 2 * slope * error
        return Tracked(centred * root * factor + shift, bound)

    def _gelu(self, x: Array) -> Tracked:
        """Hendrycks and Gimpel (2016), section 2, by tanh."""
        inner = (2 / np.pi) ** 0.5 * x * (1 + 0.044715 * x * x)
        value = 0.5 * x * (1 + np.tanh(inner))
        error = self._rounding.store * np.abs(value) + SHARED * self._rounding.work * np.abs(x)
        return Tracked(value, error)

    def _residual(self, x: Tracked, summed: Array, name: str, gate: Array | None) -> Tracked:
        step = summed + self._linears[name].bias
        off = abs(step)
        if gate is not None:
            step = step * gate
            off = off * abs(gate) + abs(step)
        value = x.value + step
        return Tracked(value, x.error + self._rounding.store * (off + abs(value)))


def _flat(x_NHD: Array) -> Array:
    return x_NHD.reshape(len(x_NHD), -1)


def _stage(name: str, got: Array, want: Tracked) -> Stage:
    num = len(got)
    value, error = want
    return Stage(name, got.reshape(num, -1), value.reshape(num, -1), error.reshape(num, -1))
