"""What stands outside the blocks, written out from its definitions, in float64.

Nothing here calls what streams call: `models.schedule`, `noise`, `rope` and the model's own
patches, norm and projections are under test. Errors are worked out as in `tolerance`.
"""

import hashlib
import math
import struct
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from scope_contracts.arithmetic import LAMBDA
from scope_contracts.envelope import PPEnvelope
from scope_rt.integrity.audit_plan import CallPlan
from scope_rt.integrity.oracle_attention import frequencies
from scope_rt.integrity.tolerance import SHARED, Rounding

_SEED_BYTES = 8
_CLEAN = 0.0
"""The timestep of latents without noise."""


class Estimate(NamedTuple):
    """Float64 numbers, and how far off a kernel's own may be."""

    value: Tensor
    error: Tensor


def timesteps_of(envelope: PPEnvelope) -> list[float]:
    """Of a chunk's calls in order: recompute, steps, clean pass."""
    clean = [_CLEAN]
    steps = list(envelope.denoising_step_list)
    return clean * envelope.do_kv_recompute + steps + clean * envelope.clean_pass


def noise_of(envelope: PPEnvelope, step: int, shape: tuple[int, ...]) -> Tensor:
    """What every rank must draw before `step` (0: the chunk's start), float32 on the CPU."""
    numbers = (envelope.base_seed, envelope.cache_epoch, envelope.chunk_index, step)
    digest = hashlib.blake2b(struct.pack("<4q", *numbers), digest_size=_SEED_BYTES).digest()
    drawn = torch.Generator().manual_seed(int.from_bytes(digest, "little") // 2)
    return torch.randn(shape, generator=drawn)


@lru_cache(maxsize=64)
def sigma_of(timestep: float, *, shift: float, num_steps: int) -> float:
    """Of the training step nearest to `timestep`, the noisier one of two that are as near.

    Esser et al. 2024, eq. 23: a share s of all steps has sigma = shift s / (1 + (shift - 1) s).
    """
    sigma = timestep / num_steps
    share = sigma / (shift - (shift - 1) * sigma)
    middle = round(share * num_steps)
    near = [min(max(1, middle + off), num_steps) / num_steps for off in (1, 0, -1)]
    levels = [shift * s / (1 + (shift - 1) * s) for s in near]
    return min(levels, key=lambda level: abs(level * num_steps - timestep))


def patches_of(latents: Tensor) -> Tensor:
    """`[..., F, C, 2 h, 2 w]` as `[..., F, h w, 4 C]`: a channel's patch of 2 x 2 lies together."""
    rows: Tensor = functional.pixel_unshuffle(latents, 2).flatten(-2).mT
    return rows


def head_rows(parameter: Tensor) -> Tensor:
    """The head's rows, of which all channels of a cell lie together, in the order of patches."""
    rows: Tensor = parameter.unflatten(0, (4, -1))
    return rows.transpose(0, 1).flatten(0, 1)


def rotation_table(plan: CallPlan, head_dim: int, roundoff: float) -> Estimate:
    """Cosine and sine of every token's angles, `[T, head_dim / 2, 2]`, kept with `roundoff`."""
    by_frame, by_place = _angles(plan.rows, plan.columns, head_dim)
    frames = torch.arange(plan.num_frames, dtype=torch.float64) + plan.first_frame
    angles = (frames[:, None, None] * by_frame + by_place).flatten(0, 1)
    turns = torch.stack((angles.cos(), angles.sin()), dim=-1)
    # An angle is off by some units of float64, and its cosine by as much.
    return Estimate(turns, 1.01 * roundoff * turns.abs() + 2.0**-50 * (1 + angles[..., None]))


@lru_cache(maxsize=8)
def _angles(rows: int, columns: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """By which pairs turn from frame to frame, `[head_dim / 2]`, and at every place of a frame."""
    rates, axes = map(torch.from_numpy, frequencies(head_dim))
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).double()
    by_row, by_column = (places[:, axis, None] * rates * (axes == axis + 1) for axis in (0, 1))
    return rates * (axes == 0), by_row + by_column


class Projection:
    """A small linear layer as it was loaded, in float64: 8 bytes a weight.

    Bounds hold for all numbers of a row alike, `[..., 1]`: that costs little, and what is wrong is
    hardly ever smaller.
    """

    def __init__(self, weight: Tensor, bias: Tensor, rounding: Rounding) -> None:
        self._weight_T = weight.detach().flatten(1).double().T.contiguous()
        self._bias, self._rounding = bias.detach().double().clone(), rounding
        self._size = float(self._weight_T.pow(4).sum(0).max()) ** 0.25

    def of(self, x: Tensor) -> Estimate:
        """`W x + b` of rows `[..., n]`."""
        value = x @ self._weight_T
        return self._estimate(value.add_(self._bias), _fourth_norm(x), 0.0)

    def of_normed(self, x: Tensor, scale: Tensor, shift: Tensor, *, eps: float) -> Estimate:
        """`W h + b`, where h is `x` after a layer norm, scaled by 1 + `scale` and shifted.

        `x` is `[K, N, n]`, `scale` and `shift` are `[K, n]`. Norm and scale are applied to the
        weights. Four numbers are stored on the way to h, none larger than what x and its mean make
        of one.
        """
        n, factor = x.shape[-1], 1 + scale
        squares = x.square()
        mean = x.mean(-1, keepdim=True)
        root = (squares.mean(-1, keepdim=True) - mean.square() + eps).rsqrt()
        weight = factor[..., None] * self._weight_T
        value = (x @ weight - mean * weight.sum(1, keepdim=True)) * root
        value += (shift @ self._weight_T + self._bias)[:, None]
        size = torch.linalg.vector_norm(squares, dim=-1, keepdim=True).sqrt()
        size += mean.abs() * n**0.25
        size *= root * factor.abs().amax(-1)[:, None, None]
        size += _fourth_norm(shift)[:, None]
        off = 4 * self._rounding.store + LAMBDA * self._rounding.work
        return self._estimate(value, size, off)

    def _estimate(self, value: Tensor, size: Tensor, off: float) -> Estimate:
        """`size` is the fourth norm of rows that are off by `off` of it (`tolerance`)."""
        n, u = len(self._weight_T), self._rounding.work
        per_size = (LAMBDA * math.sqrt(n / 3) + SHARED) * u + 2 * self._rounding.store
        walk = (LAMBDA * u * math.sqrt(n / 6) + off) * self._size
        largest = value.abs().amax(-1, keepdim=True)
        # With the bias's size, for the sum without it may be as large.
        return Estimate(value, walk * size + per_size * (largest + self._bias.abs().max()))


def _fourth_norm(x: Tensor) -> Tensor:
    """`(sum x^4)^(1/4)` of every row, `[..., 1]`."""
    norms: Tensor = torch.linalg.vector_norm(x.square(), dim=-1, keepdim=True)
    return norms.sqrt_()


def next_input(
    x: Tensor, flow: Tensor, noise: Tensor, *, sigma: float, following: float, rounding: Rounding
) -> Estimate:
    """An Euler step from `sigma` to x0, then noise up to `following`, where 0 adds none.

    Six results are stored on the way; each is off by at most its unit roundoff, and 2 more for the
    factors, which are rounded as well. The bound is that of the largest numbers.
    """
    x0 = x.double() - sigma * flow.double()
    value = (1 - following) * x0 + following * noise.double()
    step, clean, added = (float(each.abs().max()) for each in (flow, x0, noise))
    size = (1 - following) * (2 * sigma * step + 3 * clean) + 2 * following * added
    bound = 1.01 * rounding.stored * (size + 2 * value.abs().max())
    return Estimate(value, bound)


def mixed_input(given: Tensor, noise: Tensor, *, sigma: float, rounding: Rounding) -> Estimate:
    """Clean latents with noise of level `sigma`. Three results are stored on the way, each off by
    at most its unit roundoff, and a factor of each product is rounded as well."""
    clean, added = (1 - sigma) * given.double(), sigma * noise.double()
    size = float(clean.abs().max() + added.abs().max())
    return Estimate(clean + added, torch.tensor(1.01 * rounding.stored * 3 * size))
