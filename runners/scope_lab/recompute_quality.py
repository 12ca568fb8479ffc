"""What a viewer would notice of a stream: are things there, do they move as asked, do they jump?

Judged by pixels alone, and on the embedded model's world, whose speeds are known.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scope_lab.tiny.detector import detect
from scope_lab.tiny.verdicts import judge, psnr_db
from scope_lab.tiny.world import SPEED_PX_PER_FRAME
from scope_rt.text.words import Colour, SceneSpec

Frames = NDArray[np.uint8]
_Centres = dict[Colour, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One stream, in figures; not a number where there is nothing to judge."""

    colours: float
    """Share of chunks in which all named colours are seen."""
    shapes: float
    """Share of chunks in which all named shapes are recognised."""
    motion: float
    """How far a named object moves from frame to frame inside a chunk (median), as a share of the
    named speed."""
    flicker: float
    """Mean absolute difference of two frames across a chunk border, over that of two frames inside
    a chunk."""
    psnr_db: float
    """To the reference stream; infinite for equal ones."""


def judge_stream(
    chunks: Sequence[Frames], scene: SceneSpec, *, reference: Sequence[Frames]
) -> Quality:
    """Judge the chunks of one epoch, each uint8 `[T, H, W, 3]`, against the scene asked for."""
    verdicts = [judge(frames, scene) for frames in chunks]
    return Quality(
        colours=_share(verdict.all_colours for verdict in verdicts),
        shapes=_share(verdict.all_shapes for verdict in verdicts),
        motion=_motion(chunks, scene),
        flicker=_flicker(chunks),
        psnr_db=_psnr_db(chunks, reference),
    )


def _share(passed: Iterator[bool]) -> float:
    return statistics.fmean(passed)


def _flicker(chunks: Sequence[Frames]) -> float:
    inside = [step for frames in chunks for step in map(_difference, frames, frames[1:])]
    across = [_difference(before[-1], after[0]) for before, after in pairwise(chunks)]
    if not across or not any(inside):
        return math.nan
    return statistics.fmean(across) / statistics.fmean(inside)


def _difference(first_HWC: Frames, second_HWC: Frames) -> float:
    return float(np.abs(first_HWC.astype(np.int16) - second_HWC).mean())


def _motion(chunks: Sequence[Frames], scene: SceneSpec) -> float:
    """A bounce shortens a step or two, so the median is the speed."""
    named = [thing.colour for thing in scene.objects]
    steps_px = [
        math.dist(before[colour], after[colour])
        for frames in chunks
        for before, after in pairwise(map(_centres, frames))
        for colour in named
        if colour in before and colour in after
    ]
    if not steps_px:
        return math.nan
    return statistics.median(steps_px) / SPEED_PX_PER_FRAME[scene.speed]


def _centres(frame_HWC: Frames) -> _Centres:
    """Where the largest area of each colour is."""
    return {seen.colour: seen.centre_px for seen in reversed(detect(frame_HWC))}


def _psnr_db(chunks: Sequence[Frames], reference: Sequence[Frames]) -> float:
    video, other = np.concatenate(chunks), np.concatenate(reference)
    return math.inf if np.array_equal(video, other) else psnr_db(video, other)
