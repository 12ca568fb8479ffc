"""One token of a block is computed again in float64, from the block's input to its output.

Each stage starts from what was observed before it (the block's input, what attention and each
all-reduce gave), so the first stage that differs is where the fault is. Between them nothing of the
model's own code is called: norms, projections, rotation, text attention, GELU and residuals are
written out here, with the bound of what a kernel's rounding may do to them (`tolerance`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.linear_sums import LinearSums, to_array
from scope_rt.integrity.oracle_attention import text_attended, turned
from scope_rt.integrity.recorder import NUM_REDUCED, BlockRecord
from scope_rt.integrity.tolerance import (
    SHARED,
    SQUARES_ROUNDOFF,
    STEEPEST_GELU,
    Array,
    Rounding,
    Tracked,
)
from scope_rt.models.causal_wan import Block

_EXACT = np.zeros((1, 1))


class Stage(NamedTuple):
    """Numbers `[N, n]` of N records that were computed twice."""

    name: str
    got: Array
    want: Array
    bound: Array


class _Rows:
    """The numbers of N records, cut out of their flat vectors."""

    def __init__(self, records: Sequence[BlockRecord]) -> None:
        self._flat = np.stack([record.flat().numpy() for record in records])
        self._at = 0

    def take(self, *shape: int) -> Array:
        size = int(np.prod(shape))
        part = self._flat[:, self._at : self._at + size]
        self._at += size
        return part.reshape(-1, *shape)


class BlockOracle:
    """Knows a block's weights as they were loaded: matrices by sums, vectors by value."""

    def __init__(self, block: Block, rounding: Rounding) -> None:
        self._config, self._rounding = block.config, rounding
        one, two, ffn = block.attn1, block.attn2, block.ffn.net
        self._linears = {
            "to_q": LinearSums(one.to_q),
            "to_k": LinearSums(one.to_k),
            "to_v": LinearSums(one.to_v),
            "to_out": LinearSums(one.to_out[0]),  # type: ignore[arg-type]
            "text to_q": LinearSums(two.to_q),
            "text to_out": LinearSums(two.to_out[0]),  # type: ignore[arg-type]
            "ffn up": LinearSums(ffn[0]["proj"]),  # type: ignore[index]
            "ffn down": LinearSums(ffn[2]),  # type: ignore[arg-type]
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
        qkv, attention = ([rows.take(*heads) for _ in range(3)] for _ in range(2))
        widths = (2, dim, 1, dim, dim)
        reduced = [(rows.take(width), rows.take(width)) for width in widths[:NUM_REDUCED]]
        out = rows.take(dim)
        sums: list[Stage] = []
        product = self._product_with(sums)
        yield from self._before_attention(product, records, (x, mod), qkv, reduced[0])
        yield _stage("self-attention", attention[0], Tracked(*attention[1:]))
        partial = product("to_out", Tracked(_flat(attention[0]), _EXACT))
        yield _stage("attention's output projection", reduced[1][0], partial)
        x1 = self._residual(Tracked(x, _EXACT), reduced[1][1], "to_out", mod[:, 2])
        yield from self._text(product, records, x1, reduced[2:4])
        x2 = self._residual(x1, reduced[3][1], "text to_out", None)
        h = self._modulated(x2, mod[:, 3], mod[:, 4])
        up = self._with_bias(product("ffn up", h), "ffn up")
        down = product("ffn down", self._gelu(up))
        yield _stage("feed-forward", reduced[4][0], down)
        yield _stage("block output", out, self._residual(x2, reduced[4][1], "ffn down", mod[:, 5]))
        yield from sums

    def _product_with(self, sums: list[Stage]) -> Callable[[str, Tracked], Tracked]:
        def product(name: str, x: Tracked) -> Tracked:
            y, (got, want, bound) = self._linears[name].product(x, self._rounding)
            sums.append(Stage(f"weights of {name}", got, want, bound))
            return y

        return product

    def _before_attention(
        self,
        product: Callable[[str, Tracked], Tracked],
        records: Sequence[BlockRecord],
        inputs: tuple[Array, Array],
        qkv: Sequence[Array],
        squares: tuple[Array, Array],
    ) -> Iterator[Stage]:
        x, mod = inputs
        h = self._modulated(Tracked(x, _EXACT), mod[:, 0], mod[:, 1])
        positions = [record.plan.position(record.audit.token) for record in records]
        store = self._rounding.store + 8 * SQUARES_ROUNDOFF
        for index, name in enumerate(("to_q", "to_k")):
            projected = self._with_bias(product(name, h), name)
            own = self._squares(projected)
            yield _stage(f"sum of squares of {name}", squares[0][:, index : index + 1], own)
            normed = self._normed(projected, squares[1][:, index : index + 1], index)
            shaped = Tracked(*(part.reshape(qkv[index].shape) for part in normed))
            yield _stage(
                f"{name}, normed and rotated", qkv[index], turned(shaped, positions, store)
            )
        yield _stage("to_v", qkv[2], self._with_bias(product("to_v", h), "to_v"))

    def _text(
        self,
        product: Callable[[str, Tracked], Tracked],
        records: Sequence[BlockRecord],
        x: Tracked,
        reduced: Sequence[tuple[Array, Array]],
    ) -> Iterator[Stage]:
        weight, bias = self._norm2
        normed = self._plain_norm(x)
        value = normed.value * weight + bias
        error = normed.error * abs(weight) + self._rounding.store * (abs(value) + abs(bias))
        q = self._with_bias(product("text to_q", Tracked(value, error)), "text to_q")
        yield _stage("sum of squares of text to_q", reduced[0][0], self._squares(q))
        q = self._normed(q, reduced[0][1], 2)
        shape = (len(records), -1, self._config.attention_head_dim)
        batch, text = records[0].audit.batch, records[0].text
        k, v = to_array(text.k[batch]), to_array(text.v[batch])
        shaped = Tracked(*(part.reshape(shape) for part in q))
        partial = product("text to_out", text_attended(shaped, k, v, self._rounding))
        yield _stage("text attention", reduced[1][0], partial)

    def _with_bias(self, y: Tracked, name: str) -> Tracked:
        value = y.value + self._linears[name].bias
        return Tracked(value, y.error + self._rounding.store * abs(value))

    def _squares(self, x: Tracked) -> Tracked:
        value = (x.value * x.value).sum(-1, keepdims=True)
        off = x.value * x.error
        error = 2 * np.sqrt((off * off).sum(-1, keepdims=True))
        error += (x.error * x.error).sum(-1, keepdims=True)
        shared = LAMBDA * x.value.shape[-1] ** 0.5 * SQUARES_ROUNDOFF
        return Tracked(value, error + (shared + 2 * SHARED * self._rounding.work) * value)

    def _normed(self, x: Tracked, squares: Array, norm: int) -> Tracked:
        """RMS norm over all heads of all ranks, whose sum of squares was observed."""
        root = 1 / np.sqrt(squares / self._config.dim + self._config.eps)
        scale = root * self._norms[norm]
        value = x.value * scale
        off = 3 * self._rounding.store + 8 * SQUARES_ROUNDOFF
        return Tracked(value, x.error * abs(scale) + off * abs(value))

    def _plain_norm(self, x: Tracked) -> Tracked:
        num = x.value.shape[-1]
        mean = x.value.sum(-1, keepdims=True) / num
        centred = x.value - mean
        spread = np.einsum("nj,nj->n", centred, centred)[:, None] / num
        root = 1 / np.sqrt(spread + self._config.eps)
        value = centred * root
        size = (abs(x.value) + abs(mean)) * root
        error = 2 * x.error * root + LAMBDA * self._rounding.work * size
        return Tracked(value, error + self._rounding.store * abs(value))

    def _modulated(self, x: Tracked, shift: Array, scale: Array) -> Tracked:
        normed, factor = self._plain_norm(x), 1 + scale
        scaled = normed.value * factor
        value = scaled + shift
        error = normed.error * abs(factor)
        error += self._rounding.store * (2 * abs(scaled) + abs(value))
        return Tracked(value, error)

    def _gelu(self, x: Tracked) -> Tracked:
        """Hendrycks and Gimpel (2016), section 2, by tanh."""
        inner = (2 / np.pi) ** 0.5 * x.value * (1 + 0.044715 * x.value * x.value)
        value = 0.5 * x.value * (1 + np.tanh(inner))
        error = STEEPEST_GELU * x.error + self._rounding.store * abs(value)
        return Tracked(value, error + SHARED * self._rounding.work * abs(x.value))

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
    return Stage(name, *(part.reshape(num, -1) for part in (got, *want)))
