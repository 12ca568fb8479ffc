"""A hub that is shown a coloured picture at its pace, without ranks; not a test itself."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scope_runners.serve.media.frame import PlayedFrame
from scope_runners.serve.media.hub import MediaHub

FPS = 16
RED, GREEN = (200, 30, 30), (30, 180, 40)


class ShownHub:
    """Shows `colour` until it is changed; `told` are the events."""

    def __init__(self, folder: Path, *, max_viewers: int = 16) -> None:
        self.colour: tuple[int, int, int] = RED
        self.told: list[dict[str, Any]] = []
        self.hub = MediaHub(
            fps=Fraction(FPS),
            width=64,
            height=64,
            folder=folder,
            max_viewers=max_viewers,
            tell=self._tell,
        )
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _tell(self, kind: str, **data: Any) -> int:
        self.told.append({"type": kind, **data})
        return len(self.told)

    def pause(self) -> None:
        """Show nothing more."""
        self._has_ended.set()
        self._thread.join(10)

    def close(self) -> None:
        self.pause()
        self.hub.close()

    def _run(self) -> None:
        number = 0
        while not self._has_ended.wait(1 / FPS):
            self.hub.show(played(self.colour, number))
            number += 1


def played(colour: tuple[int, int, int], number: int) -> PlayedFrame:
    picture: NDArray[np.uint8] = np.full((64, 64, 3), colour, np.uint8)
    picture[number % 64, :8] = 255  # no two pictures are alike
    return PlayedFrame(
        frame_HWC=picture,
        number=number,
        time_90k=number * 90_000 // FPS,
        chunk_index=number // 12,
        cache_epoch=0,
        is_first=number % 12 == 0,
    )


@contextmanager
def shown_hub(folder: Path, *, max_viewers: int = 16) -> Iterator[ShownHub]:
    shown = ShownHub(folder, max_viewers=max_viewers)
    try:
        yield shown
    finally:
        shown.close()


def is_colour(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> bool:
    """Whether the middle of a picture is of a colour, after lossy codecs."""
    height, width = picture.shape[:2]
    middle = picture[height // 4 : -height // 4, width // 4 : -width // 4].mean((0, 1))
    return bool(np.abs(middle - np.array(colour)).max() < 40)
