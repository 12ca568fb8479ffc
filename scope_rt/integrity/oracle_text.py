"""Attention over a text, as sums: a text is constant, and so is what follows it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.oracle_attention import EXP_ROUNDINGS
from scope_rt.integrity.tolerance import SQUARES_ROUNDOFF, Rounding
from scope_rt.models.causal_wan import TextKV


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWeights:
    """What the texts of R layers make of queries and of the linear layers behind them."""

    keys_RBHLD: Tensor
    """Keys times the norm's weight, over the root of the head's channels."""
    values_RBHKL: Tensor
    """Sums of values as the next layer weights them, then their squares."""
    longest_RBH11: Tensor
    widest_RBH11: Tensor
    """Of the keys: length, and number."""
    length_R11: Tensor
    """Of the longest values of all heads together."""

    def at(self, layers: Tensor) -> "TextWeights":
        """Of some of the layers, in that order."""
        return TextWeights(
            keys_RBHLD=self.keys_RBHLD[layers],
            values_RBHKL=self.values_RBHKL[layers],
            longest_RBH11=self.longest_RBH11[layers],
            widest_RBH11=self.widest_RBH11[layers],
            length_R11=self.length_R11[layers],
        )

    def of_batch(self, batch: int | None) -> "TextWeights":
        """Of one batch row, or all."""
        if batch is None or len(self.keys_RBHLD[0]) == 1:
            return self
        row = slice(batch, batch + 1)
        return replace(
            self,
            keys_RBHLD=self.keys_RBHLD[:, row],
            values_RBHKL=self.values_RBHKL[:, row],
            longest_RBH11=self.longest_RBH11[:, row],
            widest_RBH11=self.widest_RBH11[:, row],
        )

    @classmethod
    def of(cls, texts: Sequence[TextKV], norm_RC: Tensor, sums_RKC: Tensor) -> "TextWeights":
        layers, (num, _, heads, dim) = len(texts), texts[0].k.shape
        k, v = (
            torch.stack(each).transpose(2, 3).to(norm_RC.dtype)
            for each in ([text.k for text in texts], [text.v for text in texts])
        )
        keys = k * norm_RC.view(layers, 1, heads, 1, dim) / math.sqrt(dim)
        by_head = sums_RKC.view(layers, 1, -1, heads, dim).transpose(2, 3)
        values = by_head @ v.mT
        lengths = torch.linalg.vector_norm(v, dim=-1).amax(-1)
        shape = (layers, num, heads, 1, 1)
        return cls(
            keys_RBHLD=keys.contiguous(),
            values_RBHKL=torch.cat((values, values * values), dim=-2),
            longest_RBH11=torch.linalg.vector_norm(keys, dim=-1).amax(-1).view(shape),
            widest_RBH11=keys.abs().amax((3, 4)).view(shape),
            length_R11=torch.linalg.vector_norm(lengths, dim=-1).amax(-1).view(-1, 1, 1),
        )


def text_attended(
    scores_RBHLN: Tensor, lengths_RBH1N: Tensor, text: TextWeights, *, rounding: Rounding
) -> tuple[Tensor, Tensor, float]:
    """What attention over a text makes of the next linear layer's sums, `[R, K, B * N]`.

    Lengths are those of queries. Those were stored on the way, so each number is off by a few
    roundings. Comes with a bound, and with how far off a token is beside that, relative to the
    longest values.
    """
    values, work = text.values_RBHKL, rounding.work
    num_keys = values.shape[-1]
    mean, squares = (values @ scores_RBHLN.softmax(-2)).chunk(2, dim=-2)
    largest_sum = values[..., : mean.shape[-2], :].abs().amax(-1, keepdim=True)
    spread = (squares - mean * mean).clamp_min_(0).sqrt_().add_(largest_sum * math.sqrt(8 * work))
    stored = 4 * rounding.store + 16 * SQUARES_ROUNDOFF
    widest = scores_RBHLN.abs().amax(-2, keepdim=True)
    per_length = (2 * work * (LAMBDA + 6)) * text.longest_RBH11 + stored * text.widest_RBH11
    r = (lengths_RBH1N * per_length).add_(widest, alpha=stored)
    r += 2 * work * (6 * math.log(num_keys) + EXP_ROUNDINGS)
    bound = (r.expm1() * r.exp() * spread).sum(2)
    error = 2 * (LAMBDA * math.sqrt(num_keys / 3) + 8) * work + 3 * rounding.store
    return _in_a_row(mean.sum(2)), _in_a_row(bound), error


def _in_a_row(sums_RBKN: Tensor) -> Tensor:
    """`[R, K, B * N]`."""
    return sums_RBKN.transpose(1, 2).flatten(2)
