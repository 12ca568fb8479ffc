"""Name what a picture shows, by classical segmentation: knows the palette, never a model.

A pixel belongs to a colour when it lies more than half the way from the background to that colour,
so blur moves an outline but not the area, and the shape test compares outlines of equal area.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from scope_lab.tiny.world import (
    BACKGROUND_RGB,
    CIRCLE_RADIUS_PX,
    COLOUR_RGB,
    SQUARE_HALF_PX,
    TRIANGLE_RADIUS_PX,
    coverage,
)
from scope_rt.text.words import Colour, SceneSpec, Shape

MIN_AREA_PX = 60
MIN_IOU = 0.6
_MIN_WAY = 0.5
_MAX_MISS = 0.45
"""How far off the line from background to colour a pixel may lie, relative to its length."""

_PALETTE = np.array([COLOUR_RGB[colour] for colour in Colour], dtype=np.float64)
_GROUNDS = np.array(list(BACKGROUND_RGB.values()), dtype=np.float64)
_AREA_PX = {
    Shape.CIRCLE: np.pi * CIRCLE_RADIUS_PX**2,
    Shape.SQUARE: 4 * SQUARE_HALF_PX**2,
    Shape.TRIANGLE: 3 * 3**0.5 / 4 * TRIANGLE_RADIUS_PX**2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """One connected area of one colour; `shape` is None when it looks like none of them."""

    colour: Colour
    shape: Shape | None
    area_px: int
    centre_px: tuple[float, float]
    """(x, y) of its centroid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReport:
    """What a chunk shows of the scene it was asked for."""

    colours_present: bool
    """Every named colour is seen in at least half of the frames."""
    shapes_right: bool
    """Every named object's shape wins the vote over the frames."""
    no_extra: bool
    """At least half of the frames hold nothing that was not named."""


def detect(frame_HWC: NDArray[np.uint8]) -> list[Detection]:
    """All objects in an RGB picture, largest first."""
    pixels = frame_HWC.astype(np.float64)
    labels = _colour_of_pixels(pixels, _background(pixels))
    found = []
    for index, colour in enumerate(Colour):
        for mask in _connected(labels == index):
            area_px = int(mask.sum())
            if area_px >= MIN_AREA_PX:
                rows, columns = np.nonzero(mask)
                centre_px = (float(columns.mean()) + 0.5, float(rows.mean()) + 0.5)
                found.append(
                    Detection(
                        colour=colour,
                        shape=_shape(mask, area_px, centre_px),
                        area_px=area_px,
                        centre_px=centre_px,
                    )
                )
    return sorted(found, key=lambda seen: -seen.area_px)


def chunk_report(frames_THWC: NDArray[np.uint8], scene: SceneSpec) -> ChunkReport:
    """Compare the frames of one chunk with the scene that was asked for."""
    frames = [detect(frame) for frame in frames_THWC]
    named = {thing.colour: thing.shape for thing in scene.objects}

    def present(colour: Colour) -> bool:
        return 2 * sum(any(d.colour is colour for d in seen) for seen in frames) >= len(frames)

    def voted(colour: Colour) -> Shape | None:
        votes = Counter(d.shape for seen in frames for d in seen if d.colour is colour)
        return votes.most_common(1)[0][0] if votes else None

    clean = sum(len(seen) <= len(named) and all(d.colour in named for d in seen) for seen in frames)
    return ChunkReport(
        colours_present=all(present(colour) for colour in named),
        shapes_right=all(present(c) and voted(c) is shape for c, shape in named.items()),
        no_extra=2 * clean >= len(frames),
    )


def _background(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    """The named background nearest to the median pixel: objects never cover half a picture."""
    median = np.median(pixels.reshape(-1, 3), axis=0)
    nearest = np.square(_GROUNDS - median).sum(1).argmin()
    return np.asarray(_GROUNDS[nearest])


def _colour_of_pixels(
    pixels: NDArray[np.float64], ground: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Index of each pixel's colour, -1 for none: `[H, W]`."""
    way = _PALETTE - ground
    length2 = np.square(way).sum(1)
    off = pixels - ground
    along = off @ way.T
    share = np.clip(along / length2, 0, 1)
    miss2 = np.square(off).sum(-1, keepdims=True) - 2 * share * along + share**2 * length2
    best = miss2.argmin(-1)
    chosen = best[..., None]
    far = np.take_along_axis(share, chosen, -1)[..., 0] > _MIN_WAY
    near = np.take_along_axis(miss2 / length2, chosen, -1)[..., 0] < _MAX_MISS**2
    return np.where(far & near, best, -1)


def _connected(mask: NDArray[np.bool_]) -> Iterator[NDArray[np.bool_]]:
    """The connected parts of a mask (4 neighbours)."""
    left = {(int(row), int(column)) for row, column in np.argwhere(mask)}
    while left:
        stack, part = [left.pop()], np.zeros_like(mask)
        while stack:
            row, column = stack.pop()
            part[row, column] = True
            for near in (
                (row - 1, column),
                (row + 1, column),
                (row, column - 1),
                (row, column + 1),
            ):
                if near in left:
                    left.remove(near)
                    stack.append(near)
        yield part


def _shape(mask: NDArray[np.bool_], area_px: int, centre_px: tuple[float, float]) -> Shape | None:
    """The shape whose outline of equal area, at the same centroid, overlaps the mask best."""
    height, width = mask.shape
    dx = torch.arange(width) + 0.5 - centre_px[0]
    dy = (torch.arange(height) + 0.5 - centre_px[1])[:, None]
    overlap: dict[Shape, float] = {}
    for shape in Shape:
        scale = float((area_px / _AREA_PX[shape]) ** 0.5)
        outline = coverage(shape, dx, dy, scale=scale).numpy() > 0.5
        overlap[shape] = float((outline & mask).sum() / (outline | mask).sum())
    best = max(overlap, key=lambda shape: overlap[shape])
    return best if overlap[best] >= MIN_IOU else None
