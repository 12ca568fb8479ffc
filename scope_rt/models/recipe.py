"""A checkpoint family is a value: how a model is sampled and how its cache is kept up."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from scope_contracts.cache_spec import CacheChoice, CacheKind
from scope_contracts.errors import UserInputError
from scope_rt.models.recipe_checks import OPTIONAL, checked
from scope_rt.models.recipe_choices import (
    CacheUpkeep,
    NewText,
    Positions,
    RecomputeText,
    TransitionWeights,
)
from scope_rt.models.schedule import NOISE_LEVELS, FlowSchedule

RECIPE_NAME = "recipe.json"


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
    first_chunk_steps: tuple[float, ...] = ()
    """Nominal steps of an epoch's first chunk, or the first after its start frame; empty where it
    has those of all others."""
    start_frame: bool = False
    """Whether a stream may begin with a picture in the place of its first block."""
    kv_cache_attention_bias: float = 1.0
    """Weight of past chunks where nobody asks for another."""
    rollout_frames: int = 0
    """After so many frames in the cache a new rollout begins, at position 0; 0 for no end."""
    rollout_overlap: int = 0
    """Frames of a rollout that the one before has made: a picture of it, encoded again, and its
    last latents."""
    positions: Positions = Positions.IN_EPOCH
    new_text: NewText = NewText.KEEP_CACHE
    recompute_text: RecomputeText = RecomputeText.CURRENT
    transition_weights: TransitionWeights = TransitionWeights.OFF_SOURCE
    latent_limit: float | None = None
    """No number of a chunk's latents is larger than this, unless it was computed wrong; None where
    that is not known."""

    @property
    def schedule(self) -> FlowSchedule:
        return FlowSchedule(shift=self.shift)

    @property
    def timesteps(self) -> tuple[float, ...]:
        """The steps as the model is fed them, 0..1000."""
        return self._fed(self.denoising_steps)

    def timesteps_from(self, noise_scale: float, steps: tuple[float, ...]) -> tuple[float, ...]:
        """The steps of a chunk that begins at the noise level `noise_scale`: there, and then those
        of `steps` that lie below. Levels lie on a grid: a model keeps something for each."""
        schedule = FlowSchedule(shift=self.shift)
        level = max(1, round(noise_scale * NOISE_LEVELS)) / NOISE_LEVELS
        first = schedule.nearest(level)
        return (first, *(step for step in steps if step < first))

    @property
    def first_chunk_timesteps(self) -> tuple[float, ...]:
        """The same of an epoch's first chunk."""
        return self._fed(self.first_chunk_steps or self.denoising_steps)

    def _fed(self, steps: tuple[float, ...]) -> tuple[float, ...]:
        return self.schedule.warp(steps) if self.warp_steps else steps

    @property
    def clean_pass(self) -> bool:
        return self.cache_upkeep is CacheUpkeep.CLEAN_PASS

    def rolls_at(self, start_frame: int) -> bool:
        """Whether a chunk that starts there is the first of a rollout but not of its epoch."""
        after = start_frame - self.rollout_frames
        period = self.rollout_frames - self.rollout_overlap
        return self.rollout_frames > 0 and after >= 0 and after % period == 0

    @property
    def recaches(self) -> bool:
        """Whether a new text makes the latest frames again, where they lie."""
        return self.new_text is NewText.RECACHE

    @property
    def context_frames(self) -> int:
        """Latent frames from which a cache can be rebuilt.

        A model that keeps its cache by clean passes needs that only after ranks were lost; then
        it is given all frames that a chunk sees beside itself. One that re-caches is given as many
        as its cache holds, then and with every new text.
        """
        if self.rollout_frames:
            return self.rollout_frames
        if self.recaches:
            return self.sink_frames + self.window_frames
        if self.clean_pass:
            return self.sink_frames + self.window_frames - self.frames_per_block
        return self.kv_cache_num_frames

    def check_cache(self, choice: CacheChoice) -> None:
        """Refuse a kind of cache that could not do its work for this model.

        Raises:
            UserInputError: naming a kind that can.
        """
        if choice.kind in (CacheKind.H2O, CacheKind.HIERARCHICAL) and self.recaches:
            raise UserInputError(
                f"kv_cache {choice} keeps frames by what was seen of them, and this model makes "
                "its latest frames again with every new prompt; use ring, quantized or paged"
            )
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
        if not isinstance(raw, dict):
            names = ", ".join(sorted(field.name for field in fields(cls)))
            raise UserInputError(f"{path} is no JSON object; want one with the entries {names}")
        return cls.of_entries(raw, where=str(path))

    @classmethod
    def of_entries(cls, raw: Mapping[str, Any], *, where: str) -> Self:
        """The recipe that a file states; `where` begins each sentence about it.

        Raises:
            UserInputError: unknown or missing entries, or values that no stream could follow.
        """
        entries, names = dict(raw), {field.name for field in fields(cls)}
        missing = names - set(entries) - OPTIONAL
        if missing or set(entries) - names:
            wrong = {"unknown": set(entries) - names, "missing": missing}
            said = [f"{kind} entries: {', '.join(sorted(n))}" for kind, n in wrong.items() if n]
            raise UserInputError(f"{where}: {'; '.join(said)}; correct the file")
        try:
            recipe = cls(**{name: checked(name, value) for name, value in entries.items()})
            recipe.check_frames()
            recipe.check_start_frame()
        except ValueError as error:
            raise UserInputError(f"{where}: {error}; correct the entry") from error
        return recipe

    def with_entries(self, entries: Mapping[str, tuple[str, Any]]) -> Self:
        """With other values, each as a file has it after where it stands there.

        Raises:
            UserInputError: no stream could follow them.
        """
        values = dict[str, Any]()
        for name, (where, value) in entries.items():
            try:
                values[name] = checked(name, value)
            except ValueError as error:
                raise UserInputError(f"{where}: {error}; correct the entry") from error
        recipe = replace(self, **values)
        if recipe.frames_per_block > 1:  # a project's file has made it another of its models
            recipe = replace(recipe, start_frame=False)
        try:
            recipe.check_frames()
        except ValueError as error:
            places = ", ".join(dict.fromkeys(where for where, _ in entries.values()))
            raise UserInputError(f"{places}: {error}; correct the entries") from error
        return recipe

    def check_frames(self) -> None:
        """Raises ValueError for numbers of frames that no stream could follow."""
        if self.frames_per_block > self.window_frames:
            raise ValueError(
                f"window_frames is {self.window_frames}, want at least frames_per_block, "
                f"which is {self.frames_per_block}"
            )
        self._check_rollouts()
        if not self.clean_pass:
            self._check_recompute()
        elif self.recompute_text is not RecomputeText.CURRENT:
            raise ValueError(
                f"recompute_text is {self.recompute_text!s}, want current with cache_upkeep "
                "clean_pass"
            )
        elif self.kv_cache_num_frames != 0:
            raise ValueError(
                f"kv_cache_num_frames is {self.kv_cache_num_frames}, want 0 with cache_upkeep "
                "clean_pass"
            )

    def check_start_frame(self) -> None:
        """Raises ValueError where no picture could take the place of a block."""
        if self.start_frame and (self.frames_per_block != 1 or not self.clean_pass):
            raise ValueError(
                f"start_frame is true, want false but with frames_per_block 1 and cache_upkeep "
                f"clean_pass, here {self.frames_per_block} and {self.cache_upkeep!s}: a picture is "
                "one latent frame, written into the cache as clean ones are"
            )

    def _check_rollouts(self) -> None:
        frames, overlap, block = self.rollout_frames, self.rollout_overlap, self.frames_per_block
        if not frames and not overlap:
            return
        if not 0 < overlap < frames <= self.window_frames or frames % block or overlap % block:
            raise ValueError(
                f"rollout_frames is {frames}, rollout_overlap is {overlap}, want multiples of "
                f"{block}, the second below the first, and that at most window_frames "
                f"{self.window_frames}"
            )
        if not self.clean_pass or self.sink_frames or self.recaches:
            raise ValueError(
                f"rollout_frames is {frames}, want 0 but with cache_upkeep clean_pass, no "
                "sink_frames, and new_text keep_cache"
            )

    def _check_recompute(self) -> None:
        if self.new_text is not NewText.KEEP_CACHE:
            raise ValueError(
                f"new_text is {self.new_text!s}, want keep_cache with cache_upkeep recompute: each "
                "chunk makes its past again"
            )
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
