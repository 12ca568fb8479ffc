"""What a chunk sees and what stays in the cache is what its policy must have chosen.

Frames in view and their weights follow from where the chunk ends; where attention decides, the
choice follows from scores, scores from masses, and masses from queries and keys. All of it is
worked out a second time by `frame_reference`: view and masses where calls are watched, the choice
and its scores with every chunk.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from scope_contracts.arithmetic import ReducedSum
from scope_contracts.integrity import suspect_from
from scope_rt.checks import Checks
from scope_rt.integrity.edge_reference import Estimate
from scope_rt.integrity.frame_reference import chosen_frames, num_other
from scope_rt.integrity.reduced_sums import ReducedPair
from scope_rt.kv_cache.frame_cache import Choice
from scope_rt.models.generator import ChunkGenerator

_Found = tuple[str, float, float, float]
"""What is off: its name, the number, what it must be and the bound."""


class KeptFrames:
    """One generator rank's; asked once a chunk, when the cache has advanced."""

    def __init__(self, generator: ChunkGenerator, *, rank: int, checks: Checks) -> None:
        self._generator, self._rank, self._checks = generator, rank, checks
        self._sums: tuple[ReducedSum, ...] = ()
        self._scores: dict[int, float] = {}
        """Of the frames that the last choice kept."""

    def end(self, chunk: int, *, masses: Mapping[int, Estimate] | None, seen_from: int) -> None:
        """`masses` are what the last call gave every frame, by layer that was watched; None where
        the chunk is not watched. `seen_from` is the first chunk since one was.

        Raises:
            IntegrityError: naming the chunk, the rank and what was chosen otherwise.
        """
        where, cache = f"chunk {chunk}, rank {self._rank}", self._generator.cache
        choices, self._sums = cache.take_choices(), ()
        if masses is not None:
            with suspect_from(seen_from):
                for window in self._generator.windows:
                    num = num_other(cache.spec, window)
                    self._tell(
                        where,
                        ("frames in view that do not belong there, or weigh otherwise", num, 0, 0),
                    )
        if cache.spec.needs_attention_scores:
            with suspect_from(chunk):
                self._check_choices(where, choices)
        if masses and choices and choices[-1].masses:
            with suspect_from(seen_from):
                for layer, estimate in masses.items():
                    self._check_mass(f"{where}, layer {layer}", choices[-1].masses[layer], estimate)
                self._add_up(choices[-1])

    def report(self) -> tuple[ReducedSum, ...]:
        """The all-reduce of a watched chunk's masses; empty in a group of one."""
        return self._sums

    def _tell(self, where: str, found: _Found) -> None:
        name, got, want, bound = found
        if not abs(got - want) <= bound:
            self._checks.cached_rows(where, name, got, want, bound)

    def _check_choices(self, where: str, choices: Sequence[Choice]) -> None:
        """One follows each window of the chunk, and the last one what all layers have added."""
        spec, windows = self._generator.cache.spec, self._generator.windows
        self._tell(where, ("choices of frames", len(choices), len(windows), 0))
        if choices:
            num_added = len(choices[-1].masses)
            self._tell(where, ("layers that add to scores", num_added, spec.num_layers, 0))
        for window, choice in zip(windows, choices, strict=False):
            if window.num_tokens == window.indices.global_end_index:  # nothing came before
                self._scores = {}
            for found in self._of_choice(choice):
                self._tell(where, found)
            scores = dict(zip(choice.frames, choice.scores.tolist(), strict=True))
            self._scores = {frame: scores[frame] for frame in choice.kept}

    def _of_choice(self, choice: Choice) -> Iterator[_Found]:
        found = choice.found.tolist()
        mass, scores = choice.mass.double().tolist(), choice.scores.tolist()
        for slot, frame in enumerate(choice.frames):
            yield f"score of frame {frame}", found[slot], self._scores.get(frame, 0.0), 0
            yield f"score of frame {frame}, added to", scores[slot], found[slot] + mass[slot], 0
        want = chosen_frames(self._generator.cache.spec, choice.frames, scores)
        yield "frames that stay", len(want.symmetric_difference(choice.kept)), 0, 0

    def _check_mass(self, where: str, got: Tensor, estimate: Estimate) -> None:
        want, error = (each.tolist() for each in estimate)
        for frame_slot, mass in enumerate(got.tolist()):
            name = f"attention to frame slot {frame_slot}"
            self._tell(where, (name, mass, want[frame_slot], error[frame_slot]))

    def _add_up(self, choice: Choice) -> None:
        """Over layers here; over ranks where they are compared."""
        by_layer = torch.stack(list(choice.masses))
        pair = ReducedPair.of(by_layer.sum(0)).with_result(choice.mass)
        self._sums = (pair.on_host("attention to frames"),)
