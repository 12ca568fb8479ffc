"""A stream in two dozen labelled pictures, whatever its length: every change and an even spread."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scope_rt.video.contact_sheet import write_contact_sheet
from scope_runners.job import Timeline
from scope_runners.summary import ChunkRecord

_SPREAD = 24
_MOST_CHANGES = 24


class Storyboard:
    """Keeps the middle frame of the chunks that tell the story."""

    def __init__(self, timeline: Timeline, *, fps: int) -> None:
        last = timeline.num_chunks - 1
        spread = {round(last * step / (_SPREAD - 1)) for step in range(_SPREAD)}
        changes = [event.chunk_index for event in timeline.events][:_MOST_CHANGES]
        self._kept = spread.union(changes)
        self._fps = fps
        self._num_frames = 0
        self._num_prompts = 0
        self._previous: tuple[int, str] | None = None
        self._frames: list[NDArray[np.uint8]] = []
        self._labels: list[str] = []

    def keeps(self, chunk_index: int) -> bool:
        """Whether a picture of this chunk is wanted."""
        return chunk_index in self._kept

    def add(self, chunk: ChunkRecord, picture_HWC: NDArray[np.uint8] | None) -> None:
        """See the next chunk, and its middle frame if it is kept."""
        label = self._label(chunk)
        if picture_HWC is not None:
            self._frames.append(picture_HWC)
            self._labels.append(label)
        self._num_frames += chunk.frames
        self._previous = (chunk.cache_epoch, chunk.prompt)

    def write(self, path: Path) -> None:
        """Draw the contact sheet, whole or not at all."""
        write_contact_sheet(self._frames, self._labels, path)

    def _label(self, chunk: ChunkRecord) -> str:
        epoch, prompt = self._previous or (chunk.cache_epoch, None)
        words = [f"{(self._num_frames + chunk.frames // 2) / self._fps:.1f}s"]
        words.append(f"e{chunk.cache_epoch}")
        if chunk.cache_epoch != epoch:
            words.append("cut")
        if chunk.prompt != prompt:
            self._num_prompts += 1
            words.append(f"prompt {self._num_prompts}")
        return " ".join(words)
