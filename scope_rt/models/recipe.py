"""A checkpoint family is a value: how a model is sampled and how its cache is kept up."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

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
    latent_limit: float | None = None
    """No number of a chunk's latents is larger than this, unless it was computed wrong; None where
    that is not known."""

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
                f"kv_cache {choice} scores frames in clean passes, and this model rebuilds its "
                "cache from the latest frames instead, so there is nothing to choose; use ring, "
                "quantized or paged"
            )
        if choice.kind is CacheKind.HIERARCHICAL and not self.clean_pass:
            raise UserInputError(
                f"kv_cache {choice} sums up frames that leave the window, and this model "
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
        except FileNotFoundError as error:
            raise UserInputError(
                f"model folder {folder} has no {RECIPE_NAME}, which says how its model is sampled; "
                "write it, by runbooks/guides/your-own-model.md (scope-rt runbook your-own-model)"
            ) from error
        except OSError as error:
            raise UserInputError(f"cannot read {path}: {error}; point to a model folder") from error
        except (ValueError, RecursionError) as error:
            raise UserInputError(f"{path} is no JSON: {error}; correct the file") from error
        names = {field.name for field in fields(cls)}
        if not isinstance(raw, dict):
            raise UserInputError(
                f"{path} is no JSON object; want one with the entries {', '.join(sorted(names))}"
            )
        missing = names - set(raw) - _OPTIONAL
        if missing or set(raw) - names:
            wrong = {"unknown": set(raw) - names, "missing": missing}
            said = [f"{kind} entries: {', '.join(sorted(n))}" for kind, n in wrong.items() if n]
            raise UserInputError(f"{path}: {'; '.join(said)}; correct the file")
        try:
            for name, (fits, want) in _ENTRIES.items():
                if name in raw and not fits(raw[name]):
                    raise ValueError(f"{name} is {raw[name]!r}, want {want}")
            raw["denoising_steps"] = tuple(map(float, raw["denoising_steps"]))
            raw["cache_upkeep"] = CacheUpkeep(raw["cache_upkeep"])
            recipe = cls(**raw | {"shift": float(raw["shift"])})
            recipe._check_frames()
        except ValueError as error:
            raise UserInputError(f"{path}: {error}; correct the entry") from error
        return recipe

    def _check_frames(self) -> None:
        """Raises ValueError for numbers of frames that no stream could follow."""
        if self.frames_per_block > self.window_frames:
            raise ValueError(
                f"window_frames is {self.window_frames}, want at least frames_per_block, "
                f"which is {self.frames_per_block}"
            )
        if not self.clean_pass:
            self._check_recompute()
        elif self.kv_cache_num_frames != 0:
            raise ValueError(
                f"kv_cache_num_frames is {self.kv_cache_num_frames}, want 0 with cache_upkeep "
                "clean_pass"
            )

    def _check_recompute(self) -> None:
        most = self.window_frames - self.frames_per_block
        if not 1 <= self.kv_cache_num_frames <= most:
            raise ValueError(
                f"kv_cache_num_frames is {self.kv_cache_num_frames}, want 1 to {most}: context and "
                "chunk share the window"
            )
        if self.sink_frames:
            raise ValueError(
                f"sink_frames is {self.sink_frames}, want 0 with cache_upkeep recompute: its "
                "anchor is one"
            )

    def save(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, sort_keys=True)
        (folder / RECIPE_NAME).write_text(text + "\n")


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _are_steps(value: object) -> bool:
    if not isinstance(value, list) or not value or not all(map(_is_number, value)):
        return False
    is_falling = all(later < earlier for earlier, later in pairwise(value))
    return is_falling and value[0] <= 1000 and value[-1] > 0


def _whole(least: int) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: type(value) is int and value >= least), f"a whole number from {least}"


_ENTRIES: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "denoising_steps": (_are_steps, "a list of numbers, falling, above 0 and at most 1000"),
        "shift": (
            lambda value: _is_number(value) and 0 < value <= 1000,
            "a number above 0 and at most 1000",
        ),
        "frames_per_block": _whole(1),
        "window_frames": _whole(1),
        "sink_frames": _whole(0),
        "fps": _whole(1),
        "default_height": _whole(1),
        "default_width": _whole(1),
        "cache_upkeep": (lambda value: value in list(CacheUpkeep), " or ".join(CacheUpkeep)),
        "kv_cache_num_frames": _whole(0),
        "warp_steps": (lambda value: type(value) is bool, "true or false"),
        "latent_limit": (
            lambda value: value is None or (_is_number(value) and value > 0),
            "a number above 0, or null",
        ),
    }
)
"""What each entry of the file may be, by itself."""
_OPTIONAL = frozenset({"latent_limit"})
