"""A whole stream at one look: labelled frames in a grid, in one PNG that is complete or absent."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from scope_rt import output_file

_CELL_SIDE_PX = 160
_LABEL_HEIGHT_PX = 18
_LABEL_SIZE_PX = 12
_GAP_PX = 4
_PAPER = (24, 24, 28)
_INK = (230, 230, 230)


def write_contact_sheet(
    frames: Sequence[NDArray[np.uint8]], labels: Sequence[str], path: Path
) -> None:
    """Draw equally sized uint8 RGB `frames` (each HWC), each above its label, row by row.

    Small frames are enlarged by a whole factor, so pixels stay square. Raises `ValueError` if
    there is no frame or not one label a frame, `UserInputError` if `path` cannot be written.
    """
    if not frames or len(frames) != len(labels):
        raise ValueError(
            f"labels: got {len(labels)} for {len(frames)} frames, want one for each, at least one"
        )
    height, width, _ = frames[0].shape
    scale = max(1, _CELL_SIDE_PX // min(height, width))
    cell_width = width * scale + _GAP_PX
    cell_height = height * scale + _LABEL_HEIGHT_PX + _GAP_PX
    num_columns = _num_columns(len(frames), aspect=cell_width / cell_height)
    num_rows = math.ceil(len(frames) / num_columns)
    size = (num_columns * cell_width + _GAP_PX, num_rows * cell_height + _GAP_PX)
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=_LABEL_SIZE_PX)
    for index, (frame_HWC, label) in enumerate(zip(frames, labels, strict=True)):
        left = index % num_columns * cell_width + _GAP_PX
        top = index // num_columns * cell_height + _GAP_PX
        picture = Image.fromarray(frame_HWC).resize(
            (width * scale, height * scale), Image.Resampling.NEAREST
        )
        sheet.paste(picture, (left, top))
        draw.text((left, top + height * scale + 1), label, fill=_INK, font=font)
    with output_file.replacing(path, suffixes=(".png",)) as partial:
        sheet.save(partial)


def _num_columns(num_cells: int, *, aspect: float) -> int:
    """Columns for a sheet about 16:9, with cells of width/height `aspect`."""
    return min(num_cells, max(1, round(math.sqrt(num_cells * 16 / 9 / aspect))))
