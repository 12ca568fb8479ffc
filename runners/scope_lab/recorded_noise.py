"""The noise of a recording, in place of what a stream draws."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from scope_rt.models.noise import INITIAL


@dataclass(frozen=True, slots=True)
class RecordedNoise:
    """`start` has each chunk's own, `renoise` that of its later steps in turn."""

    start: Sequence[Tensor]
    renoise: Sequence[Sequence[Tensor] | Tensor]

    def draw(
        self,
        *,
        base_seed: int,
        cache_epoch: int,
        chunk_index: int,
        step: int,
        shape: tuple[int, ...],
    ) -> Tensor:
        if step == INITIAL:
            return self.start[chunk_index]
        return self.renoise[chunk_index][step - 1].view(shape)
