"""Which pictures can be recorded, said before any is made."""

import math
from fractions import Fraction
from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_rt.video.segments import MemoryLedger, VideoSegments

_SMALLEST_VIEWABLE_SIDE = 256
_MOST_PIXELS = 16382
"""Of a side: the even number that H.264's and VP8's encoders both take."""


def check_recordable(
    path: Path, *, width: int, height: int, fps: Fraction | int, scale: int | None = None
) -> None:
    """Raise the `UserInputError` of a new `VideoWriter`; an earlier recording stays as it is."""
    check_format(width, height, fps, viewable_scale(width, height) if scale is None else scale)
    VideoSegments(path, MemoryLedger()).release()


def viewable_scale(width: int, height: int) -> int:
    """How often a pixel is repeated each way, so that a person sees a small model's output."""
    return max(1, math.ceil(_SMALLEST_VIEWABLE_SIDE / max(1, min(width, height))))


def check_format(width: int, height: int, fps: Fraction | int, scale: int) -> None:
    """Refuse pictures that the encoders do not take.

    Raises:
        UserInputError: naming the field and what to change.
    """
    for name, value in (("width", width), ("height", height)):
        if value <= 0 or value * scale % 2:
            raise UserInputError(
                f"{name}: got {value} pixels times scale {scale}, want a positive even number; "
                f"change {name} or scale"
            )
        if value * scale > _MOST_PIXELS:
            raise UserInputError(
                f"{name}: got {value} pixels times scale {scale}, want at most {_MOST_PIXELS}; "
                f"change {name} or scale"
            )
    if scale < 1:
        raise UserInputError(f"scale: got {scale}, want 1 or more")
    if fps <= 0:
        raise UserInputError(f"fps: got {fps}, want more than 0")
