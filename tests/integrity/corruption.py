"""One thing of a stream is changed on purpose at one chunk; not a test itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.models.generator import ChunkGenerator
from scope_rt.session import StreamSession
from tests.tiny_folder import tiny_folder

PROMPT = "a red circle and a blue square, fast, on navy"


@dataclass
class Change:
    """Calls `change` with what passes `point` at `chunk`; what it returns passes on instead."""

    point: FaultPoint
    chunk: int
    change: Callable[[Any], Any]
    was_made: bool = field(default=False, init=False)

    def reach(self, point: FaultPoint, chunk: int, value: Any) -> Any:
        if (point, chunk) != (self.point, self.chunk):
            return value
        self.was_made = True
        changed = self.change(value)
        return value if changed is None else changed


def stream(change: Change, *, num_chunks: int, shown: list[Chunk], **settings: Any) -> None:
    """Add to `shown` what a session of `settings` shows; raises what it raises."""
    given: dict[str, Any] = {"model": tiny_folder()}
    config = StreamConfig.of(**(given | settings))
    with StreamSession(config, instruments=Instruments(faults=change)) as session:
        for chunk in session.stream(PROMPT, num_chunks=num_chunks):
            shown.append(chunk)


def flip_bit(tensor: Tensor, index: int = 5) -> None:
    """The lowest bit of one number."""
    tensor.detach().view(-1).view(torch.uint8)[index * tensor.element_size()] ^= 1


def swap_rows(tensor: Tensor) -> None:
    """Two rows of a weight: its sum stays."""
    with torch.no_grad():
        tensor[[0, 1]] = tensor[[1, 0]].clone()


def stored_rows(generator: ChunkGenerator, *, layer: int, plane: int) -> Tensor:
    """What the cache holds of the first part of a plane: `[B, slots, heads, width]`."""
    part: Tensor = generator.cache.storage.rows.parts[plane][0]  # type: ignore[attr-defined]
    return part[layer]
