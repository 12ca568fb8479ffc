"""What a block's tensors are weighted by, so that one product with them yields every sum.

Modulations and gates are part of the weights: they are constant over a call. So is what a text
makes of queries. All follows from weights as they were loaded, and from the generator's state.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum

import torch
from torch import Tensor

from scope_rt.integrity.block_sums import ProductSums
from scope_rt.integrity.linear_sums import NUM_SUMS, signs
from scope_rt.integrity.oracle_attention import Workspace
from scope_rt.models.causal_wan import Block, Modulation, TextKV


class Seen(Enum):
    """What is observed of a block, of all tokens."""

    __hash__ = object.__hash__  # members are looked up often, and `Enum` hashes their names

    INPUT = "input"
    Q_PRODUCT = "to_q"
    K_PRODUCT = "to_k"
    VALUES = "to_v"
    ATTENTION = "attended"
    PROJECTED = "self-attention"
    """Its value is what ranks call its all-reduce, as for others that are summed over ranks."""
    AFTER_ATTENTION = "after self-attention"
    """The residual stream, with what self-attention adds to it."""
    TEXT_Q_PRODUCT = "text to_q"
    TEXT_PROJECTED = "text attention"
    AFTER_TEXT = "after text attention"
    """Computed from what was observed, as `ACTIVATION` is."""
    UP = "ffn up"
    """What the first layer of the feed-forward gives."""
    ACTIVATION = "activation"
    DOWN = "feed-forward"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """A layer norm's scale and shift, as the linear layer behind it sees them."""

    shift_sums_1K: Tensor
    largest_11: Tensor
    """Of the scale."""
    shift_11: Tensor
    """Length of the shift."""
    mean_sums_1K: Tensor
    """What a mean of 1 adds to the sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """How a step is added to the residual stream."""

    bias_sums_1K: Tensor
    """Of the linear layer's bias, gated."""
    largest_11: Tensor
    bias_11: Tensor
    """Length of the bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWeights:
    """Of one layer at one noise level; everything but `columns` is alike in shape for all."""

    columns: dict[Seen, Tensor]
    """`[C, sums]`."""
    first_norm: Affine
    text_norm: Affine
    second_norm: Affine
    first_gate: Gate
    second_gate: Gate


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWeights:
    """What one layer's text makes of queries and of the linear layer behind it."""

    keys_BHDL: Tensor
    """Keys times the norm's weight, over the root of the head's channels."""
    values_BHLK: Tensor
    """Sums of values as the next layer weights them, then their squares."""
    longest_BH11: Tensor
    widest_BH11: Tensor
    """Of the keys: length, and number."""
    length: Tensor
    """Of the longest values of all heads together."""

    def of_batch(self, batch: int | None) -> Tensor:
        """The keys of one batch row, or of all."""
        return self.keys_BHDL if batch is None else self.keys_BHDL[batch : batch + 1]

    @classmethod
    def of(cls, text: TextKV, norm_R: Tensor, sums_RK: Tensor) -> "TextWeights":
        batch, _, heads, dim = text.k.shape
        k, v = (x.transpose(1, 2).to(norm_R.dtype) for x in (text.k, text.v))
        keys = k * norm_R.view(heads, 1, dim) / math.sqrt(dim)
        values = v @ sums_RK.view(heads, dim, -1)
        lengths = torch.linalg.vector_norm(v, dim=-1).amax(-1)
        return cls(
            keys_BHDL=keys.transpose(2, 3).contiguous(),
            values_BHLK=torch.cat((values, values * values), dim=-1),
            longest_BH11=torch.linalg.vector_norm(keys, dim=-1).amax(-1).view(batch, heads, 1, 1),
            widest_BH11=keys.abs().amax((2, 3)).view(batch, heads, 1, 1),
            length=torch.linalg.vector_norm(lengths, dim=-1).amax().view(1, 1),
        )


class BlockWeights:
    """All blocks' weights as they were loaded: matrices by sums, vectors by value."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        weight = blocks[0].norm2.weight
        self.config, self.device = blocks[0].config, weight.device
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self.is_half = weight.dtype.itemsize < self.dtype.itemsize

        def sums(*path: str | int, has_bias: bool = True) -> ProductSums:
            linears = [_at(block, path) for block in blocks]
            return ProductSums.of(linears, has_bias=has_bias, dtype=self.dtype)

        def vectors(*path: str | int) -> Tensor:
            found = [_at(block, path).get_parameter("weight").detach() for block in blocks]
            return torch.stack(found).to(self.dtype)

        self.to_q, self.to_k, self.to_v = (sums("attn1", name) for name in ("to_q", "to_k", "to_v"))
        self.to_out = sums("attn1", "to_out", 0, has_bias=False)
        self.text_to_q = sums("attn2", "to_q")
        self.text_to_out = sums("attn2", "to_out", 0, has_bias=False)
        self.up, self.down = sums("ffn", "net", 0, "proj"), sums("ffn", "net", 2, has_bias=False)
        self.norm_q, self.norm_k = vectors("attn1", "norm_q"), vectors("attn1", "norm_k")
        self.text_norm_q, self.norm2 = vectors("attn2", "norm_q"), vectors("norm2")
        self.norm2_bias = torch.stack([block.norm2.bias.detach() for block in blocks]).to(
            self.dtype
        )
        head_signs = signs(self.config.attention_head_dim, NUM_SUMS)
        self.head_signs_DK = torch.from_numpy(head_signs).to(self.device, self.dtype)
        first = self.to_q.signs_RK[:, 0].double().cpu().numpy()
        self.first_signs_HD = first.reshape(-1, self.config.attention_head_dim)
        """On the host: a chunk's positions are turned there, and may wait for no device."""
        self.workspace = Workspace()
        self._by_call: dict[tuple[int, float], tuple[Modulation, CallWeights]] = {}
        self._by_text: dict[int, tuple[TextKV, TextWeights]] = {}

    def of_call(self, layer: int, timestep: float, modulation: Modulation) -> CallWeights:
        """`modulation` is alike for all frames, and made once for a noise level."""
        key = (layer, timestep)
        if key not in self._by_call or self._by_call[key][0] is not modulation:
            of_layer = modulation.layers[layer].to(self.dtype).view(6, self.config.dim)
            self._by_call[key] = (modulation, self._of_call(layer, of_layer))
        return self._by_call[key][1]

    def of_text(self, layer: int, text: TextKV) -> TextWeights:
        """`text` is made once for a prompt."""
        if layer not in self._by_text or self._by_text[layer][0] is not text:
            norm, sums = self.text_norm_q[layer], self.text_to_out.sums_LCK[layer]
            self._by_text[layer] = (text, TextWeights.of(text, norm, sums))
        return self._by_text[layer][1]

    def _of_call(self, layer: int, modulation_6C: Tensor) -> CallWeights:
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation_6C
        of_channels, of_heads = self.to_out.signs_RK, self.to_q.signs_RK
        qkv = torch.cat([each.sums_LCK[layer] for each in (self.to_q, self.to_k, self.to_v)], dim=1)
        text, up = self.text_to_q.sums_LCK[layer], self.up.sums_LCK[layer]
        text_scale, text_shift = self.norm2[layer], self.norm2_bias[layer]
        columns = {
            Seen.INPUT: self._normed_columns(qkv, 1 + scale1),
            Seen.Q_PRODUCT: _beside(of_heads, self.norm_q[layer]),
            Seen.K_PRODUCT: _beside(of_heads, self.norm_k[layer]),
            Seen.VALUES: self.to_v.signs_RK,
            Seen.ATTENTION: self.to_out.sums_LCK[layer],
            Seen.PROJECTED: _beside(of_channels, gate1),
            Seen.AFTER_ATTENTION: self._normed_columns(text, text_scale),
            Seen.TEXT_Q_PRODUCT: self.text_to_q.signs_RK,
            Seen.TEXT_PROJECTED: of_channels,
            Seen.AFTER_TEXT: self._normed_columns(up, 1 + scale2),
            Seen.UP: self.up.signs_RK,
            Seen.ACTIVATION: self.down.sums_LCK[layer],
            Seen.DOWN: _beside(of_channels, gate2),
            Seen.OUTPUT: of_channels,
        }
        return CallWeights(
            columns=columns,
            first_norm=_affine(qkv, 1 + scale1, shift1),
            text_norm=_affine(text, text_scale, text_shift),
            second_norm=_affine(up, 1 + scale2, shift2),
            first_gate=_gate(self.to_out.bias_LR[layer], gate1, of_channels),
            second_gate=_gate(self.down.bias_LR[layer], gate2, of_channels),
        )

    def _normed_columns(self, sums_CK: Tensor, scale_C: Tensor) -> Tensor:
        """The scaled sums, then the signs, then the mean."""
        num = len(scale_C)
        mean = torch.full((num, 1), 1 / num, device=self.device, dtype=self.dtype)
        return torch.cat((scale_C[:, None] * sums_CK, self.to_out.signs_RK, mean), dim=1)


def stacked(parts: Sequence[Affine | Gate | TextWeights]) -> dict[str, Tensor]:
    """Fields of several calls by name, `[R, 1, ...]`."""
    return {
        field.name: torch.stack([getattr(part, field.name) for part in parts])
        for field in fields(parts[0])
    }


def _at(block: Block, path: Sequence[str | int]) -> torch.nn.Module:
    return block.get_submodule(".".join(map(str, path)))


def _beside(signs_CK: Tensor, factor_C: Tensor) -> Tensor:
    return torch.cat((signs_CK, factor_C[:, None] * signs_CK), dim=1)


def _affine(sums_CK: Tensor, scale_C: Tensor, shift_C: Tensor) -> Affine:
    return Affine(
        shift_sums_1K=shift_C[None] @ sums_CK,
        largest_11=scale_C.abs().amax().view(1, 1),
        shift_11=torch.linalg.vector_norm(shift_C).view(1, 1),
        mean_sums_1K=scale_C[None] @ sums_CK,
    )


def _gate(bias_C: Tensor, gate_C: Tensor, signs_CK: Tensor) -> Gate:
    return Gate(
        bias_sums_1K=(bias_C * gate_C)[None] @ signs_CK,
        largest_11=gate_C.abs().amax().view(1, 1),
        bias_11=torch.linalg.vector_norm(bias_C).view(1, 1),
    )
