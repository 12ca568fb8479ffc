"""Rotary angles are computed for the positions asked for, so a stream has no last frame.

Formula: RoFormer (Su et al., 2021), with Wan's split of a head over time, height and width. Angles
are taken in float64: at frame 10^6 a float32 angle would already be off by 0.06 rad.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

THETA = 10_000.0


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Channels of a head that rotate with (time, height, width)."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def angles(positions: Tensor, dim: int, theta: float = THETA) -> Tensor:
    """Radians by which `dim` channels turn at each position: float64 `[*positions, dim / 2]`."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim
    return positions[..., None].double() * theta**-exponents


def rotations(
    frames: Sequence[int], *, grid: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> Tensor:
    """Unit complex numbers for every token, `[frames * rows * columns, 1, head_dim / 2]`.

    `frames` are absolute latent-frame positions, `grid` the token rows and columns of a frame, and
    `dtype` the complex type of the result.
    """
    rows, columns = grid
    dims = axis_dims(head_dim)
    by_time, by_row, by_column = (
        angles(torch.as_tensor(positions), dim)
        for positions, dim in zip((frames, range(rows), range(columns)), dims, strict=True)
    )
    shape = (len(frames), rows, columns)
    turns = torch.cat(
        [
            by_time[:, None, None].expand(*shape, -1),
            by_row[None, :, None].expand(*shape, -1),
            by_column[None, None, :].expand(*shape, -1),
        ],
        dim=-1,
    )
    return torch.polar(torch.ones_like(turns), turns).flatten(0, 2)[:, None].to(dtype)


def rotate(x_BTHD: Tensor, rotations_T1C: Tensor) -> Tensor:
    """Rotate neighbouring channel pairs of every head by its token's angle."""
    pairs = torch.view_as_complex(x_BTHD.to(rotations_T1C.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations_T1C).flatten(-2).to(x_BTHD.dtype)
