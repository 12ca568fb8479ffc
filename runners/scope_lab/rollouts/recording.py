"""A recorded rollout of a project's own code: noise and prompts in, latents and pixels out.

`FOLDER/NAME.rollout.safetensors` and `.json`, beside the checkpoint that they were made from. The
values of the project's configuration come before those of the recipe, as they do in that code.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_lab.recorded_noise import RecordedNoise
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.models.family import Family
from scope_rt.models.project_config import adapter_entries, recipe_entries

_TENSORS = ("noise", "renoise", "latents")
_TAKEN = (
    "denoising_step_list",
    "denoising_step_list_first_chunk",
    "warp_denoising_step",
    "num_frame_per_block",
    "model_kwargs",
)
"""Entries that count where the family names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recording, read and checked."""

    path: Path
    tensors: dict[str, Tensor]
    details: dict[str, Any]

    @classmethod
    def read(cls, folder: Path, name: str) -> Self:
        """Raises UserInputError where it is not there, or is no recording of this form."""
        path = folder / f"{name}.rollout.safetensors"
        try:
            tensors = load_file(path)
            details = json.loads(path.with_suffix(".json").read_text())
        except (OSError, SafetensorError, ValueError) as error:
            raise UserInputError(
                f"cannot read the recording {path}: {error!r}; give a folder with "
                "NAME.rollout.safetensors and .json, and the NAME"
            ) from error
        tensors = _in_one(tensors)
        missing = [each for each in _TENSORS if each not in tensors]
        if missing or "calls" not in details:
            raise UserInputError(f"{path} lacks {', '.join(missing or ['calls'])}; copy it again")
        return cls(path=path, tensors=tensors, details=details)

    @property
    def latents(self) -> Tensor:
        """`[B, F, C, H, W]` of the whole stream."""
        return self.tensors["latents"]

    @property
    def height(self) -> int:
        return self.latents.shape[3] * 8

    @property
    def width(self) -> int:
        return self.latents.shape[4] * 8

    @property
    def prompts(self) -> list[str]:
        """In the order of the embeddings' rows."""
        details = self.details
        return list(details["prompts"]) if "prompts" in details else [details["prompt"]]

    def family_of(self, family: Family) -> Family:
        """The family with the values that the recording was made with."""
        if "generate_params" in self.details:
            return replace(family, recipe=family.recipe.with_entries(self._krea_entries(family)))
        given = {name: (self.path, value) for name, value in self._config().items()}
        taken = family.project.takes if family.project is not None else _TAKEN
        recipe = family.recipe.with_entries(recipe_entries(given, taken))
        lora = family.lora and replace(family.lora, **adapter_entries(given))
        return replace(family, recipe=recipe, lora=lora)

    def num_chunks(self, family: Family) -> int:
        return self.latents.shape[1] // family.recipe.frames_per_block

    def noise(self, family: Family) -> RecordedNoise:
        recipe, tensors = family.recipe, self.tensors
        start = tensors["noise"].split(recipe.frames_per_block, dim=1)
        renoise, used = list[Tensor](), 0
        for chunk in range(len(start)):
            steps = recipe.timesteps if chunk else recipe.first_chunk_timesteps
            renoise.append(tensors["renoise"][used : used + len(steps) - 1])
            used += len(steps) - 1
        return RecordedNoise(start, renoise)

    def schedule(self, family: Family) -> list[ScheduledEvent]:
        """When its prompts change."""
        block = family.recipe.frames_per_block
        later = self.prompts[1:]
        if (said := self._config().get("switch_frame_indices")) is not None:
            frames = [int(each) for each in str(said).split(",")]
            return [
                ScheduledEvent(chunk_index=-(-frame // block), prompt=prompt)
                for frame, prompt in zip(frames, later, strict=False)
            ]
        chunk, steps = (
            self.details.get(name) for name in ("prompt_switch_before_block", "interp_steps")
        )
        if chunk is None or not later:
            return []
        softly = TransitionSpec(num_chunks=steps or 1, method=Interpolation.LERP, bias_floor=1.0)
        transition = softly if (steps or 1) > 1 else None
        return [ScheduledEvent(chunk_index=chunk, prompt=later[0], transition=transition)]

    def anchors(self, family: Family) -> Iterator[Tensor]:
        """First frames of recorded contexts that the project's own decoder and encoder made."""
        yield from (start[:, :1] for start in self._starts())
        block, most = family.recipe.frames_per_block, family.recipe.kv_cache_num_frames
        for chunk in range(1, self.num_chunks(family)):
            context = self.tensors.get(f"recompute.{chunk}.context")
            if context is not None and chunk * block > most:
                yield context[:, :1]

    def contexts(self) -> list[Tensor]:
        """What recomputes, re-caches and later rollouts were given, in order."""
        names = [n for n in self.tensors if n.startswith(("recompute.", "recache."))]
        given = [name for name in names if name.endswith((".context", ".frames"))]
        given.sort(key=lambda name: int(name.split(".")[1]))
        return [*(self.tensors[name] for name in given), *self._starts()]

    def _starts(self) -> list[Tensor]:
        """What later rollouts began with."""
        names = sorted((n for n in self.tensors if n.endswith(".start_latents")), key=_rollout_of)
        return [self.tensors[name] for name in names]

    def text_embeds(self, num_rows: int) -> Tensor:
        """`[prompts, num_rows, width]`, zero past each prompt."""
        embeds = self.tensors["text_embeds"]
        padded = torch.zeros(len(embeds), num_rows, embeds.shape[2])
        padded[:, : embeds.shape[1]] = embeds
        return padded

    def token_ids(self) -> list[list[int]]:
        """Of each prompt, without padding."""
        ids, mask = self.tensors["token_ids"], self.tensors["attention_mask"].bool()
        return [row[valid].tolist() for row, valid in zip(ids, mask, strict=True)]

    def num_comparable_pixels(self) -> int:
        """Recorded pictures that the official decoder makes too."""
        if "pixels" not in self.tensors:
            return 0
        num = len(self.tensors["pixels"])
        for name, differences in self.details.items():
            if name.startswith("max_abs_difference_per_frame_of_this_decoder_to_the_official"):
                differing = (i for i, each in enumerate(differences) if each)
                num = min(num, next(differing, len(differences)))
        return num

    @property
    def decoder(self) -> str:
        """Which decode recorded pixels are compared with."""
        official = "the official one, which is the stream's"
        if self._starts():
            return f"{official}; the first rollout, for the project decodes each by itself"
        num, all_of_them = self.num_comparable_pixels(), len(self.tensors.get("pixels", ()))
        if num < all_of_them:
            return f"{official}; the project's own makes other pictures from picture {num} on"
        return official

    def as_recorded(self, video_TCHW: Tensor) -> Tensor:
        """Video in [-1, 1] in the range of the recorded pixels."""
        has_signs = "[-1,1]" in str(self.details.get("pixel_layout", "")).replace(" ", "")
        return video_TCHW if has_signs else video_TCHW / 2 + 0.5

    def _config(self) -> dict[str, Any]:
        """The project's configuration, in the form of its YAML."""
        details = self.details
        if "config" in details:
            return dict(details["config"])
        names = {
            "denoising_step_list": "dmd_denoising_steps",
            "warp_denoising_step": "warp_denoising_step",
            "num_frame_per_block": "num_frames_per_block",
        }
        config = {name: details[said] for name, said in names.items() if said in details}
        kwargs = {
            name: details[name] for name in ("local_attn_size", "sink_size") if name in details
        }
        shift = {"timestep_shift": details["flow_shift"]} if "flow_shift" in details else {}
        return config | {"model_kwargs": kwargs | shift}

    def _krea_entries(self, family: Family) -> dict[str, tuple[str, Any]]:
        """What Krea's server was asked for; its own YAML says other steps, which it does not
        read."""
        asked, where = self.details["generate_params"], str(self.path)
        num_steps, context = asked["num_denoising_steps"], asked["kv_cache_num_frames"]
        highest = 1000 * asked.get("strength", 1.0)
        steps = [int(highest * (1 - i / (num_steps - 1))) for i in range(num_steps)]
        entries = {
            "denoising_steps": steps,
            "shift": asked.get("timestep_shift", family.recipe.shift),
            "kv_cache_num_frames": context,
            "window_frames": context + family.recipe.frames_per_block,
        }
        return {name: (where, value) for name, value in entries.items()}


def _in_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A recording of several rollouts with noise and latents of all that is new in each, in turn.

    A later rollout is recorded with what it began with, for which no noise is used.
    """
    numbers = sorted({_rollout_of(name) for name in tensors if _rollout_of(name) >= 0})
    if not numbers or "latents" in tensors:
        return tensors
    joined = dict(tensors)
    for name, axis in (("noise", 1), ("latents", 1), ("renoise", 0)):
        parts = []
        for number in numbers:
            start = tensors.get(f"rollout{number}.start_latents")
            part = tensors.get(f"rollout{number}.{name}")
            if part is None:
                continue
            latents = tensors[f"rollout{number}.latents"]
            has_start = start is not None and part.shape[axis] == latents.shape[1]
            begun = start is not None and torch.equal(latents[:, 1 : start.shape[1]], start[:, 1:])
            if axis and start is not None and has_start and begun:
                part = part[:, start.shape[1] :]
            parts.append(part)
        if parts:
            joined[name] = torch.cat(parts, dim=axis)
    if "pixels" not in joined and "rollout0.pixels" in joined:
        joined["pixels"] = joined["rollout0.pixels"]
    return joined


def _rollout_of(name: str) -> int:
    """The number in `rollout1.noise`; -1 of other names."""
    number = name.partition(".")[0].removeprefix("rollout")
    return int(number) if name.startswith("rollout") and number.isdecimal() else -1
