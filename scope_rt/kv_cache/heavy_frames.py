"""Frames that were attended to most outlive the window, and every rank keeps the same ones.

H2O (Zhang et al. 2023) with a latent frame as its unit. A frame's score is the attention mass that
its tokens received from each chunk's clean pass since it came, over all layers, heads and queries.
Ranks that share the heads sum their parts before they choose, once a chunk; one choice serves all
layers. Sinks stay, recent frames stay, and of the others those with the best scores; of equals the
older. The number of frames is the ring's, so where the cache stands is the same function of the
start frame. A rebuilt cache starts without scores: what it remembers is its context.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.errors import CacheError
from scope_rt.attention.mass import mass_of_groups
from scope_rt.collectives import Collectives
from scope_rt.kv_cache.frame_cache import Choice, WriteWindow
from scope_rt.kv_cache.policy import HeavyHitters
from scope_rt.kv_cache.ring import segments_of
from scope_rt.tensors import digest_of

_EMPTY = -1
_MOST_CHOICES = 2
"""Of one chunk: that of a recompute, and its own."""


class HeavyFrames:
    """A slot policy for this rank's heads of `group`."""

    def __init__(self, spec: KVCacheSpec, group: Collectives) -> None:
        self._spec, self._group = spec, group
        self._choose = HeavyHitters(
            budget=spec.hitter_frames, num_sink=spec.sink_frames, num_recent=spec.recent_frames
        )
        self.scores = torch.zeros(spec.capacity_frames, dtype=torch.float64)
        """By frame slot, on the host: a sum over hours must not lose its low digits."""
        self._held = [_EMPTY] * spec.capacity_frames
        self._masses: list[Tensor] = []
        self._choices: deque[Choice] = deque(maxlen=_MOST_CHOICES)

    @property
    def frames_kept(self) -> tuple[int, ...]:
        return tuple(frame for frame in self._held if frame != _EMPTY)

    @property
    def slots_kept(self) -> Sequence[int]:
        return [slot for slot, frame in enumerate(self._held) if frame != _EMPTY]

    @property
    def scores_digest(self) -> str:
        return digest_of(self.scores[torch.tensor(self._held).argsort()])

    def plan(self, *, start_frame: int, num_frames: int) -> WriteWindow:
        free = [slot for slot, frame in enumerate(self._held) if frame == _EMPTY][:num_frames]
        held = list(self._held)
        for slot, frame in zip(free, range(start_frame, start_frame + num_frames), strict=False):
            held[slot] = frame
        indices = self._spec.indices_at(start_frame + num_frames)
        view = tuple(held[: indices.local_end_index // self._spec.frame_tokens])
        if num_frames < 1 or len(free) < num_frames or _EMPTY in view:
            raise CacheError(
                f"write of frames {start_frame}..{start_frame + num_frames - 1} does not fit "
                f"{len(free)} free frames of {len(held)}; give chunks of {self._spec.block_frames}"
            )
        segments = segments_of(free, self._spec.frame_tokens)
        return WriteWindow(segments=segments, frames_in_view=view, indices=indices)

    def observe(self, q_BTHD: Tensor, k_BKHD: Tensor) -> None:
        self._masses.append(mass_of_groups(q_BTHD, k_BKHD, group_tokens=self._spec.frame_tokens))

    def advance(self, window: WriteWindow) -> None:
        """Sum the chunk's scores over layers and ranks (one all-reduce), then choose."""
        num_visible = len(window.frames_in_view)
        self._held[:num_visible] = window.frames_in_view
        scores, masses = self.scores[:num_visible], self._masses
        found, mass = scores.clone(), torch.zeros(num_visible)
        if masses:
            mass = self._group.all_reduce_sum(torch.stack(masses).sum(0))
            scores += mass.double().cpu()
        chosen_by, self._masses = scores.clone(), []
        ages = torch.tensor(self._held[:num_visible])
        kept = set(self._choose.kept(scores, ages).tolist())
        for slot in set(range(num_visible)) - kept:
            self._held[slot] = _EMPTY
            self.scores[slot] = 0.0
        choice = Choice(
            frames=window.frames_in_view,
            found=found,
            masses=masses,
            mass=mass,
            scores=chosen_by,
            kept=self.frames_kept,
        )
        self._choices.append(choice)

    def take_choices(self) -> list[Choice]:
        taken = list(self._choices)
        self._choices.clear()
        return taken

    def reset(self) -> None:
        self._held = [_EMPTY] * self._spec.capacity_frames
        self.scores.zero_()
        self._masses = []
        self._choices.clear()
