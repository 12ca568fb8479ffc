"""A soft transition is a value: rank0 reads conditioning and bias off it, one chunk at a time.

It ends where it must, bit for bit: the last chunk has the target's embeddings and the resting bias.
Nothing here touches a cache; workers receive the numbers and know of no transition.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from scope_contracts.errors import PreflightError, UserInputError, mismatch
from scope_rt.models.recipe_choices import TransitionWeights

MIN_SINE = 1e-4
"""Below this sine of the angle between two token vectors no great circle is taken: nearly parallel
ones differ from their straight line by less than float32 tells, nearly opposite ones span none."""


class Interpolation(StrEnum):
    """How embeddings move from one prompt to the next."""

    LERP = "lerp"
    SLERP = "slerp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitionSpec:
    """How a new prompt comes in: over `num_chunks` chunks, the last of which is the new prompt.

    `bias_floor` is the extreme value of `kv_cache_attention_bias`, reached in the middle: below the
    resting value the stream forgets faster meanwhile, above it it holds on longer.

    Raises:
        UserInputError: a value is out of range.
    """

    num_chunks: int
    method: Interpolation
    bias_floor: float

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
            raise UserInputError(
                mismatch(
                    "transition num_chunks",
                    got=self.num_chunks,
                    want="1 or more",
                    fix="give the number of chunks it lasts, or no transition for a change at once",
                )
            )
        if not 0 < self.bias_floor <= 1:
            raise UserInputError(
                mismatch(
                    "transition bias_floor",
                    got=self.bias_floor,
                    want="0 < bias <= 1",
                    fix="give the stream's own kv_cache_attention_bias to leave the bias alone",
                )
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransitionStep:
    """What one chunk gets, and the transition after it; None when this was its last chunk."""

    embeds: Tensor
    kv_cache_attention_bias: float
    following: "Transition | None"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transition:
    """On the way from `source` to `target`, embeddings `[B, text_len, text_dim]`, float32 or less.

    `source` is what is in effect, an interpolant too. `step` chunks of it have been planned.

    Raises:
        PreflightError: the embeddings do not fit each other, or it is over already.
    """

    source: Tensor
    target: Tensor
    spec: TransitionSpec
    step: int = 0

    def __post_init__(self) -> None:
        source = (tuple(self.source.shape), self.source.dtype)
        target = (tuple(self.target.shape), self.target.dtype)
        if source != target:
            fix = "interpolate between embeddings of one text encoder"
            raise PreflightError(mismatch("transition target", got=target, want=source, fix=fix))
        if not 0 <= self.step < self.spec.num_chunks:
            want = f"0 to {self.spec.num_chunks - 1}"
            fix = "a transition that is over is None"
            raise PreflightError(mismatch("transition step", got=self.step, want=want, fix=fix))

    def next(
        self,
        *,
        resting_bias: float,
        weights: TransitionWeights = TransitionWeights.OFF_SOURCE,
    ) -> TransitionStep:
        """Conditioning and bias of the next chunk; `weights` say how far it has gone."""
        step, num_chunks = self.step + 1, self.spec.num_chunks
        if step == num_chunks:
            return TransitionStep(
                embeds=self.target, kv_cache_attention_bias=resting_bias, following=None
            )
        weight = step / num_chunks
        if weights is TransitionWeights.FROM_SOURCE:
            weight = (step - 1) / (num_chunks - 1)
        return TransitionStep(
            embeds=interpolate(self.source, self.target, weight, self.spec.method),
            kv_cache_attention_bias=bias_at(step, self.spec, resting_bias),
            following=replace(self, step=step),
        )


def bias_at(step: int, spec: TransitionSpec, resting_bias: float) -> float:
    """`rest^(1-e) * floor^e` with `e = sin^2(pi * step / num_chunks)`: linear in attention scores.

    Symmetric in time, at rest (`e = 0`) before the first chunk and again at the last.
    """
    mirrored = min(step, spec.num_chunks - step)
    share = math.sin(math.pi * mirrored / spec.num_chunks) ** 2
    bias = math.exp((1 - share) * math.log(resting_bias) + share * math.log(spec.bias_floor))
    low, high = sorted((resting_bias, spec.bias_floor))
    return min(max(bias, low), high)


def interpolate(source: Tensor, target: Tensor, weight: float, method: Interpolation) -> Tensor:
    """`[..., dim]` between two of the same shape and dtype; `weight` 0 is the source.

    In float64, where no square of a float32 overflows or vanishes.
    """
    between = _slerp if method is Interpolation.SLERP else torch.lerp
    exact = between(source.double(), target.double(), weight)
    # A vector may keep its length and still turn onto an axis where its dtype cannot hold it.
    limit = torch.finfo(source.dtype).max
    return exact.clamp(-limit, limit).to(source.dtype)


def _slerp(source: Tensor, target: Tensor, weight: float) -> Tensor:
    """Per vector of the last dimension: direction along the great circle, norm linearly.

    Shoemake, "Animating rotation with quaternion curves", 1985. A straight line where there is no
    great circle: nearly parallel, nearly opposite or zero vectors.
    """
    source_norm = torch.linalg.vector_norm(source, dim=-1, keepdim=True)
    target_norm = torch.linalg.vector_norm(target, dim=-1, keepdim=True)
    tiny = torch.finfo(source.dtype).tiny
    start, end = source / source_norm.clamp_min(tiny), target / target_norm.clamp_min(tiny)
    # Kahan's angle: exact where arccos of the dot product is blind.
    apart = torch.linalg.vector_norm(start - end, dim=-1, keepdim=True)
    together = torch.linalg.vector_norm(start + end, dim=-1, keepdim=True)
    angle = 2 * torch.atan2(apart, together)
    sine = torch.sin(angle)
    turned = torch.sin((1 - weight) * angle) * start + torch.sin(weight * angle) * end
    on_circle = turned / sine.clamp_min(MIN_SINE) * torch.lerp(source_norm, target_norm, weight)
    has_circle = (sine > MIN_SINE) & (source_norm > 0) & (target_norm > 0)
    return torch.where(has_circle, on_circle, torch.lerp(source, target, weight))
