"""What a block's tensors are weighted by, so that one product with them yields every sum.

Modulations and gates are part of the weights: they are constant over a call. So is what a text
makes of queries. All follows from weights as they were loaded, and from the generator's state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from scope_rt.integrity.linear_sums import NUM_SUMS, LinearSums, ProductBound, signs
from scope_rt.integrity.oracle_text import TextWeights
from scope_rt.integrity.workspace import Workspace
from scope_rt.models.causal_wan import Block, Modulation, TextKV


class Seen(Enum):
    """What is observed of a block, of all tokens."""

    __hash__ = object.__hash__  # members are looked up often, and `Enum` hashes their names

    INPUT = "input"
    Q_PRODUCT = "to_q"
    K_PRODUCT = "to_k"
    Q = "to_q, normed and rotated"
    K = "to_k, normed and rotated"
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


LOCAL = (
    Seen.Q_PRODUCT,
    Seen.K_PRODUCT,
    Seen.VALUES,
    Seen.ATTENTION,
    Seen.TEXT_Q_PRODUCT,
    Seen.Q,
    Seen.K,
)
"""What has the channels of this rank's heads; the last two are summed by signs of each token."""
STREAM = (Seen.INPUT, Seen.AFTER_ATTENTION, Seen.AFTER_TEXT, Seen.OUTPUT)
"""The residual stream; all but the last are followed by a layer norm."""
REDUCED = (Seen.PROJECTED, Seen.TEXT_PROJECTED, Seen.DOWN)
"""What is summed over ranks."""
LINEARS = (*LOCAL[:3], Seen.PROJECTED, Seen.TEXT_Q_PRODUCT, Seen.TEXT_PROJECTED, Seen.UP, Seen.DOWN)
"""What linear layers give, in the order in which blocks compute it."""


class CallColumns(NamedTuple):
    """What tensors of L layers are multiplied by at one noise level: K columns for each of S."""

    local_SLKC: Tensor
    """For `LOCAL` but the last two: signs, or what the next linear layer makes of it; of queries
    and keys, signs times the norm's weights too."""
    stream_SLKC: Tensor
    """For `STREAM`: signs, the mean, and what linear layers behind the norm make of it."""
    reduced_SLKC: Tensor
    """For `REDUCED`: signs, and these times the gate."""
    activation_LKC: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBounds:
    """What bounds follow from, of R calls of blocks: three layer norms, and two gated steps."""

    norm_R21: Tensor
    """Largest weight of the norms of queries and keys."""
    scale_R311: Tensor
    """Largest scale behind each layer norm."""
    shift_R311: Tensor
    """Length of the shift."""
    shift_sums_R3K1: Tensor
    mean_sums_R3K1: Tensor
    """What a mean of 1 adds to the sums."""
    gate_R211: Tensor
    """Largest gate of self-attention and of the feed-forward."""
    gated_bias_R211: Tensor
    """Length of the linear layer's bias."""
    gated_bias_sums_R2K1: Tensor


@dataclass(frozen=True, slots=True)
class CallWeights:
    """Of all layers at one noise level."""

    columns: CallColumns
    bounds: CallBounds


Calls = tuple[tuple[int, float], ...]
"""Layer and timestep of each."""
_MOST_REMEMBERED = 256
"""Combinations of calls."""


class BlockWeights:
    """All blocks' weights as they were loaded: matrices by sums, vectors by value."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        weight = blocks[0].norm2.weight
        self.config, self.device, self.num_layers = blocks[0].config, weight.device, len(blocks)
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self.is_half = weight.dtype.itemsize < self.dtype.itemsize

        def sums(*path: str | int, has_bias: bool = True) -> LinearSums:
            linears = [_at(block, path) for block in blocks]
            return LinearSums.of(linears, has_bias=has_bias, dtype=self.dtype)

        def vectors(name: str, *path: str | int) -> Tensor:
            found = [_at(block, path).get_parameter(name).detach() for block in blocks]
            return torch.stack(found).to(self.dtype)

        self._linears = {
            Seen.Q_PRODUCT: sums("attn1", "to_q"),
            Seen.K_PRODUCT: sums("attn1", "to_k"),
            Seen.VALUES: sums("attn1", "to_v"),
            Seen.PROJECTED: sums("attn1", "to_out", 0, has_bias=False),
            Seen.TEXT_Q_PRODUCT: sums("attn2", "to_q"),
            Seen.TEXT_PROJECTED: sums("attn2", "to_out", 0, has_bias=False),
            Seen.UP: sums("ffn", "net", 0, "proj"),
            Seen.DOWN: sums("ffn", "net", 2, has_bias=False),
        }
        self.products = ProductBound.together([self._linears[what].bound for what in LINEARS])
        self._norm_q, self._norm_k = (vectors("weight", "attn1", name) for name in _QK_NORMS)
        self._text_norm_q = vectors("weight", "attn2", "norm_q")
        self._norm2, self._norm2_bias = vectors("weight", "norm2"), vectors("bias", "norm2")
        self.up_signs_KC = self._linears[Seen.UP].signs_KR
        self.bias_after_text_LC = self._linears[Seen.TEXT_PROJECTED].bias_LR
        head_signs = signs(self.config.attention_head_dim, NUM_SUMS)
        self.head_signs_DK = torch.from_numpy(head_signs).to(self.device, self.dtype)
        first = self._linears[Seen.Q_PRODUCT].signs_KR[0].double().cpu().numpy()
        self.first_signs_HD = first.reshape(-1, self.config.attention_head_dim)
        """On the host: a chunk's positions are turned there, and may wait for no device."""
        self.workspace = Workspace()
        self._by_timestep: dict[float, tuple[Modulation, CallWeights]] = {}
        self._by_calls: dict[Calls, tuple[list[CallWeights], CallBounds]] = {}
        self._texts: tuple[TextKV, ...] = ()
        self._of_texts: TextWeights | None = None

    def of_call(self, timestep: float, modulation: Modulation) -> CallWeights:
        """`modulation` is alike for all frames, and made once for a noise level."""
        known = self._by_timestep.get(timestep)
        if known is None or known[0] is not modulation:
            layers = modulation.layers.to(self.dtype).view(-1, 6, self.config.dim)
            known = self._by_timestep[timestep] = (modulation, self._of_call(layers))
        return known[1]

    def bounds_of(self, calls: Calls, made: Mapping[float, Modulation]) -> CallBounds:
        """`made` are the modulations by timestep."""
        found = [self.of_call(timestep, made[timestep]) for _, timestep in calls]
        known = self._by_calls.get(calls)
        if known is None or not all(map(is_, known[0], found)):
            if len(self._by_calls) >= _MOST_REMEMBERED:
                self._by_calls.clear()
            of_each = [(layer, each.bounds) for (layer, _), each in zip(calls, found, strict=True)]
            gathered = {
                field.name: torch.stack(
                    [getattr(each, field.name)[layer] for layer, each in of_each]
                )
                for field in fields(CallBounds)
            }
            known = self._by_calls[calls] = (found, CallBounds(**gathered))
        return known[1]

    def of_text(self, texts: Sequence[TextKV]) -> TextWeights:
        """`texts` are all layers', made once for a prompt."""
        if len(texts) != len(self._texts) or not all(map(is_, texts, self._texts)):
            self._texts, self._of_texts = tuple(texts), None
        if self._of_texts is None:
            sums = self._linears[Seen.TEXT_PROJECTED].sums_LKC
            self._of_texts = TextWeights.of(texts, self._text_norm_q, sums)
        return self._of_texts

    def _of_call(self, modulation_L6C: Tensor) -> CallWeights:
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation_L6C.unbind(1)
        sums = {what: linear.sums_LKC for what, linear in self._linears.items()}
        of = {what: linear.signs_KR for what, linear in self._linears.items()}
        bias_LSC = torch.stack([self._linears[what].bias_LR for what in _GATED], dim=1)
        gate_LSC, channels = torch.stack((gate1, gate2), dim=1), of[Seen.DOWN]
        normed = [
            torch.cat([sums[what] for what in LOCAL[:3]], dim=1),
            sums[Seen.TEXT_Q_PRODUCT],
            sums[Seen.UP],
        ]
        normed_LSKC = _padded(normed)
        scale_LSC = torch.stack((1 + scale1, self._norm2, 1 + scale2), dim=1)
        shift_LSC = torch.stack((shift1, self._norm2_bias, shift2), dim=1)
        mean = channels.new_full((1, channels.shape[1]), 1 / channels.shape[1])
        plain = torch.cat((channels, mean)).expand(len(gate1), len(STREAM), -1, -1)
        scaled = pad(scale_LSC[:, :, None] * normed_LSKC, (0, 0, 0, 0, 0, 1))
        local = [
            _beside(of[Seen.Q_PRODUCT], self._norm_q),
            _beside(of[Seen.K_PRODUCT], self._norm_k),
            of[Seen.VALUES].expand_as(sums[Seen.PROJECTED]),
            sums[Seen.PROJECTED],
            of[Seen.TEXT_Q_PRODUCT].expand_as(sums[Seen.PROJECTED]),
        ]
        text = of[Seen.TEXT_PROJECTED].expand(len(gate1), -1, -1)
        columns = CallColumns(
            local_SLKC=_by_kind(_padded(local)),
            stream_SLKC=_by_kind(torch.cat((plain, scaled), dim=2)),
            reduced_SLKC=_by_kind(
                _padded([_beside(channels, gate1), text, _beside(channels, gate2)])
            ),
            activation_LKC=sums[Seen.DOWN],
        )
        bounds = CallBounds(
            norm_R21=torch.stack((self._norm_q, self._norm_k), dim=1).abs().amax(-1, keepdim=True),
            scale_R311=scale_LSC.abs().amax(-1)[..., None, None],
            shift_R311=torch.linalg.vector_norm(shift_LSC, dim=-1)[..., None, None],
            shift_sums_R3K1=normed_LSKC @ shift_LSC[..., None],
            mean_sums_R3K1=normed_LSKC @ scale_LSC[..., None],
            gate_R211=gate_LSC.abs().amax(-1)[..., None, None],
            gated_bias_R211=torch.linalg.vector_norm(bias_LSC, dim=-1)[..., None, None],
            gated_bias_sums_R2K1=channels @ (bias_LSC * gate_LSC)[..., None],
        )
        return CallWeights(columns, bounds)


_GATED = (Seen.PROJECTED, Seen.DOWN)
_QK_NORMS = ("norm_q", "norm_k")


def _at(block: Block, path: Sequence[str | int]) -> torch.nn.Module:
    return block.get_submodule(".".join(map(str, path)))


def _beside(signs_KC: Tensor, factor_LC: Tensor) -> Tensor:
    scaled = factor_LC[:, None] * signs_KC
    return torch.cat((signs_KC.expand_as(scaled), scaled), dim=1)


def _padded(columns_LKC: Sequence[Tensor]) -> Tensor:
    """`[L, S, K, C]`, with as many columns as the one that has most; others are 0."""
    most = max(each.shape[1] for each in columns_LKC)
    padded = [pad(each, (0, 0, 0, most - each.shape[1])) for each in columns_LKC]
    return torch.stack(padded, dim=1)


def _by_kind(columns_LSKC: Tensor) -> Tensor:
    return columns_LSKC.transpose(0, 1).contiguous()
