"""A checkpoint family is a value: how a model is sampled and how its cache is kept up."""

import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Self

from scope_contracts.cache_spec import CacheChoice, CacheKind
from scope_contracts.errors import UserInputError
from scope_rt.models.schedule import FlowSchedule

RECIPE_NAME = "recipe.json"


class CacheUpkeep(StrEnum):
    """How K/V of finished chunks are made clean."""

    CLEAN_PASS = "clean_pass"
    """After the steps, one call at t=0 rewrites the window (Self-Forcing, LongLive)."""
    RECOMPUTE = "recompute"
    """Before the steps, one call at t=0 over context frames rebuilds the cache (Krea)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a runtime must know about a model beside its weights. Frames are latent frames."""

    denoising_steps: tuple[float, ...]
    """Nominal steps (1000, 750, ...); `timesteps` warps them through the schedule."""
    shift: float
    frames_per_block: int
    window_frames: int
    sink_frames: int
    fps: int
    default_height: int
    default_width: int
    cache_upkeep: CacheUpkeep = CacheUpkeep.CLEAN_PASS
    kv_cache_num_frames: int = 0
    """Context of a recompute; 0 for a model that keeps its cache by clean passes."""
    warp_steps: bool = True
    """Whether the schedule warps the nominal steps before the model is fed them."""

    @property
    def schedule(self) -> FlowSchedule:
        return FlowSchedule(shift=self.shift)

    @property
    def timesteps(self) -> tuple[float, ...]:
        """The steps as the model is fed them, 0..1000."""
        return self.schedule.warp(self.denoising_steps) if self.warp_steps else self.denoising_steps

    @property
    def clean_pass(self) -> bool:
        return self.cache_upkeep is CacheUpkeep.CLEAN_PASS

    @property
    def context_frames(self) -> int:
        """Latent frames from which a cache can be rebuilt.

        A model that keeps its cache by clean passes needs that only after ranks were lost; then
        it is given all frames that a chunk sees beside itself.
        """
        if self.clean_pass:
            return self.sink_frames + self.window_frames - self.frames_per_block
        return self.kv_cache_num_frames

    def check_cache(self, choice: CacheChoice) -> None:
        """Refuse a kind of cache that could not do its work for this model.

        Raises:
            UserInputError: naming a kind that can.
        """
        if choice.kind is CacheKind.H2O and not self.clean_pass:
            raise UserInputError(
                f"--kv-cache {choice} scores frames in clean passes, and this model rebuilds its "
                "cache from the latest frames instead, so there is nothing to choose; use ring, "
                "quantized or paged"
            )
        if choice.kind is CacheKind.HIERARCHICAL and not self.clean_pass:
            raise UserInputError(
                f"--kv-cache {choice} sums up frames that leave the window, and this model "
                "rebuilds its cache before any does, so there is nothing to remember; use ring, "
                "quantized or paged"
            )

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read `folder/recipe.json`.

        Raises:
            UserInputError: missing or unreadable file, unknown or missing entries.
        """
        path = folder / RECIPE_NAME
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserInputError(f"cannot read {path}: {error}; point to a model folder") from error
        names = {field.name for field in fields(cls)}
        if set(raw) != names:
            wrong = ", ".join(sorted(set(raw) ^ names))
            raise UserInputError(f"{path}: these entries are unknown or missing: {wrong}")
        try:
            raw["denoising_steps"] = tuple(float(step) for step in raw["denoising_steps"])
            raw["cache_upkeep"] = CacheUpkeep(raw["cache_upkeep"])
            recipe = cls(**raw)
            recipe._check()
        except (TypeError, ValueError) as error:
            raise UserInputError(f"{path}: {error}; correct the entry") from error
        return recipe

    def _check(self) -> None:
        """Raises ValueError for a recipe that no stream could follow."""
        steps = self.denoising_steps
        falling = all(later < earlier for earlier, later in pairwise(steps))
        if not steps or not falling or not 0 < steps[-1] <= steps[0] <= 1000:
            raise ValueError(f"denoising_steps are {steps}, want them falling, in (0, 1000]")
        if not 1 <= self.frames_per_block <= self.window_frames:
            raise ValueError(
                f"window_frames is {self.window_frames}, want at least frames_per_block, "
                f"which is {self.frames_per_block}"
            )
        if not self.clean_pass:
            self._check_recompute()
        elif self.kv_cache_num_frames != 0:
            raise ValueError("kv_cache_num_frames belongs to cache_upkeep recompute; set it to 0")
        if self.sink_frames < 0 or self.fps < 1 or self.shift <= 0:
            raise ValueError("sink_frames must be at least 0, fps at least 1, shift above 0")

    def _check_recompute(self) -> None:
        most = self.window_frames - self.frames_per_block
        if not 1 <= self.kv_cache_num_frames <= most:
            raise ValueError(
                f"kv_cache_num_frames is {self.kv_cache_num_frames}, want 1 to {most}: context and "
                "chunk share the window"
            )
        if self.sink_frames:
            raise ValueError("sink_frames must be 0 with cache_upkeep recompute: its anchor is one")

    def save(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, sort_keys=True)
        (folder / RECIPE_NAME).write_text(text + "\n")
