"""Ways to break attention that turns queries and keys itself; not a test itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_rt.models.chunk_attention import TurnInWindow
from scope_rt.models.rope import rotate, rotations
from tests.integrity.audited import FAULTS, GENERATOR, Fault
from tests.tiny_models import GRID, Rollout


def _turning(change: Callable[[TurnInWindow], TurnInWindow]) -> Callable[..., None]:
    """Attention turns by other tables from now on."""

    def bring_about(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(GENERATOR + "TurnInWindow", lambda *tables: change(TurnInWindow(*tables)))

    return bring_about


def _one_place_on(table: Tensor) -> Tensor:
    return table.roll(GRID[0] * GRID[1], 0)


def _one_key_wrong(turn: TurnInWindow) -> TurnInWindow:
    keys = turn.keys.clone()
    keys[5, 0, 1] *= torch.polar(torch.ones(()), torch.full((), 0.01)).to(keys.dtype)
    return replace(turn, keys=keys)


def _in_order_of_slots(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """A cache's slots are not in the order of their frames once it rolls."""

    def turn(self: Any, window: Any, num_frames: int, grid: tuple[int, int]) -> TurnInWindow:
        num = len(window.frames_in_view)
        keys = self._rope(range(num), grid)
        return TurnInWindow(self._rope(range(num - num_frames, num), grid), keys)

    patch.setattr(type(rollout.generator), "_turn", turn)


def _turned_twice(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """By the model too, at frames of the epoch."""

    def given(self: Any, frames: range, grid: tuple[int, int]) -> Tensor:
        return rotations(frames, grid=grid, head_dim=16, dtype=torch.complex64)

    patch.setattr(type(rollout.generator), "_given_rope", given)


def _by_wrong_products(rollout: Rollout, patch: pytest.MonkeyPatch) -> None:
    """The kernel that turns is wrong; its tables are right."""

    def other(x: Tensor, table: Tensor) -> Tensor:
        turned = rotate(x, table)
        turned[:, -1, 0, 0] = x[:, -1, 0, 0]
        return turned

    patch.setattr("scope_rt.models.chunk_attention.rotate", other)


_TURNING = (
    ("keys at the next place", _turning(lambda t: replace(t, keys=_one_place_on(t.keys)))),
    ("queries a place on", _turning(lambda t: replace(t, queries=_one_place_on(t.queries)))),
    ("keys not turned", _turning(lambda t: replace(t, keys=torch.ones_like(t.keys)))),
    ("one pair of one key", _turning(_one_key_wrong)),
    ("order of slots", _in_order_of_slots),
    ("products", _by_wrong_products),
)
_SHIFTED = ("frames shifted", "rotation altered")
"""Both sides are turned by as much more, so scores stay."""
WINDOW_FAULTS = (
    *(Fault(name, "arithmetic", "self-attention", change) for name, change in _TURNING),
    Fault("turned twice", "arithmetic", "to_q, normed and rotated", _turned_twice),
    *(fault for fault in FAULTS if fault.name not in _SHIFTED),
)
