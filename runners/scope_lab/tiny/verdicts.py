"""From pictures to figures: each is a share of chunks or streams, judged by pixels alone."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scope_lab.tiny.detector import chunk_report
from scope_lab.tiny.world import BACKGROUND_RGB
from scope_rt.text.words import SceneSpec

SHORT_CHUNKS, LONG_CHUNKS = 14, 80
"""10 s and 60 s, in whole chunks of 12 frames at 16 frames/s."""
PROMPT_CHUNKS = 2
"""Within how many chunks new objects should be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkVerdict:
    """What one chunk shows of its scene; one entry per named object."""

    colours: tuple[bool, ...]
    shapes: tuple[bool, ...]
    background: bool
    nothing_else: bool

    @property
    def all_colours(self) -> bool:
        return all(self.colours)

    @property
    def all_shapes(self) -> bool:
        """Every named object has its own shape, which implies that its colour is seen."""
        return all(self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamVerdict:
    """One stream: its first prompt, then a new prompt with a hard cut, then one without."""

    steady: tuple[ChunkVerdict, ...]
    after_hard_cut: tuple[ChunkVerdict, ...] = ()
    after_prompt: tuple[ChunkVerdict, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table; `target` is a lower bound."""

    key: str
    label: str
    value: float
    unit: str
    target: float | None = None

    @property
    def missed(self) -> bool:
        """True also for a value that is not a number."""
        return self.target is not None and not self.value >= self.target


def judge(frames_THWC: NDArray[np.uint8], scene: SceneSpec) -> ChunkVerdict:
    """Compare one chunk of uint8 RGB frames with the scene that was asked for."""
    whole = chunk_report(frames_THWC, scene)
    if whole.shapes_right or len(scene.objects) == 1:
        each = [whole] * len(scene.objects)
    else:
        alone = [replace(scene, objects=(thing,)) for thing in scene.objects]
        each = [chunk_report(frames_THWC, one) for one in alone]
    median = np.median(frames_THWC.reshape(-1, 3), axis=0)
    nearest = min(BACKGROUND_RGB, key=lambda name: math.dist(BACKGROUND_RGB[name], median))
    return ChunkVerdict(
        colours=tuple(report.colours_present for report in each),
        shapes=tuple(report.shapes_right for report in each),
        background=nearest is scene.background,
        nothing_else=whole.no_extra,
    )


def psnr_db(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    """Peak signal-to-noise ratio of two uint8 videos."""
    error = np.square(first.astype(np.float64) - second).mean()
    return float(20 * np.log10(255) - 10 * np.log10(error))


def codec_figures(psnr: float, rebuilt: Sequence[ChunkVerdict]) -> list[Figure]:
    """The autoencoder, and what the detector makes of its output: no model can do better."""
    return [
        Figure(
            key="psnr_db", label="autoencoder, held-out video", value=psnr, unit="dB", target=27
        ),
        _chunks("ceiling_colours", "the same video: all named colours seen", rebuilt, _colours),
        _chunks("ceiling_shapes", "the same video: all named shapes recognised", rebuilt, _shapes),
    ]


def short_figures(streams: Sequence[StreamVerdict]) -> list[Figure]:
    """The first 10 s of every stream."""
    chunks = _flat(stream.steady[:SHORT_CHUNKS] for stream in streams)
    name = f"10 s ({len(streams)} streams)"
    each_shape = [right for chunk in chunks for right in chunk.shapes]
    each_colour = [seen for chunk in chunks for seen in chunk.colours]
    return [
        _chunks("colours_10s", f"{name}: all named colours seen", chunks, _colours, 90),
        _chunks("shapes_10s", f"{name}: all named shapes recognised", chunks, _shapes, 75),
        _share("object_colours_10s", f"{name}: colour seen, per object", each_colour),
        _share("object_shapes_10s", f"{name}: shape recognised, per object", each_shape),
        _chunks("backgrounds_10s", f"{name}: background right", chunks, _background),
        _chunks("nothing_else_10s", f"{name}: nothing else in view", chunks, _nothing_else),
    ]


def long_figures(streams: Sequence[StreamVerdict]) -> list[Figure]:
    """All of 60 s and the last 10 s of them, against the first 10 s of the same streams."""
    chosen = [stream.steady for stream in streams if len(stream.steady) == LONG_CHUNKS]
    whole, first = _flat(chosen), _flat(steady[:SHORT_CHUNKS] for steady in chosen)
    last = _flat(steady[-SHORT_CHUNKS:] for steady in chosen)
    name = f"60 s ({len(chosen)} streams)"
    figures = []
    for key, label, test in (
        ("colours", "all named colours seen", _colours),
        ("shapes", "all named shapes recognised", _shapes),
    ):
        early = _percent(map(test, first))
        for part, part_name, chunks in (
            ("60s", f"{name}, whole", whole),
            ("50s_60s", f"{name}, last 10 s", last),
        ):
            figures.append(_chunks(f"{key}_{part}", f"{part_name}: {label}", chunks, test))
            figures.append(
                Figure(
                    key=f"{key}_{part}_change",
                    label="… against their first 10 s",
                    value=figures[-1].value - early,
                    unit="points",
                    target=-10,
                )
            )
    return figures


def change_figures(streams: Sequence[StreamVerdict]) -> list[Figure]:
    """How soon the objects of a new prompt are there, with a hard cut and without."""
    figures = []
    for key, label, views, is_target in (
        ("hard_cut", "new prompt, hard cut", [s.after_hard_cut for s in streams], True),
        ("prompt", "new prompt, no cut", [s.after_prompt for s in streams], False),
    ):
        for what, test, floor in (("colours", _colours, 90), ("objects", _shapes, 75)):
            soon = [first_chunk(view, test) for view in views]
            figures.append(
                _share(
                    f"{key}_{what}_within_{PROMPT_CHUNKS}",
                    f"{label}: all new {what} within {PROMPT_CHUNKS} chunks",
                    [number <= PROMPT_CHUNKS for number in soon],
                    floor if is_target else None,
                )
            )
            figures.append(
                Figure(
                    key=f"{key}_{what}_median",
                    label="… median, counted from 1",
                    value=statistics.median(soon),
                    unit="chunks",
                )
            )
    return figures


def first_chunk(chunks: Iterable[ChunkVerdict], test: Callable[[ChunkVerdict], bool]) -> float:
    """Number, from 1, of the first chunk that passes; infinity if none does."""
    return next((n for n, chunk in enumerate(chunks, 1) if test(chunk)), math.inf)


def table(figures: Sequence[Figure]) -> str:
    """A markdown table; a missed target says so."""
    lines = ["| what | measured | target |", "|---|---:|---:|"]
    for figure in figures:
        target = "" if figure.target is None else f"≥ {figure.target:g} {figure.unit}"
        target += " **missed**" if figure.missed else ""
        sign = "+" if figure.unit == "points" else ""
        value = f"{figure.value:{sign}.1f} {figure.unit}" if figure.value < math.inf else "never"
        lines.append(f"| {figure.label} | {value} | {target} |")
    return "\n".join(lines)


def _colours(chunk: ChunkVerdict) -> bool:
    return chunk.all_colours


def _shapes(chunk: ChunkVerdict) -> bool:
    return chunk.all_shapes


def _background(chunk: ChunkVerdict) -> bool:
    return chunk.background


def _nothing_else(chunk: ChunkVerdict) -> bool:
    return chunk.nothing_else


def _flat(parts: Iterable[Sequence[ChunkVerdict]]) -> list[ChunkVerdict]:
    return [chunk for part in parts for chunk in part]


def _percent(passed: Iterable[bool]) -> float:
    values = list(passed)
    return 100 * sum(values) / len(values) if values else math.nan


def _share(key: str, label: str, passed: Iterable[bool], target: float | None = None) -> Figure:
    return Figure(key=key, label=label, value=_percent(passed), unit="%", target=target)


def _chunks(
    key: str,
    label: str,
    chunks: Sequence[ChunkVerdict],
    test: Callable[[ChunkVerdict], bool],
    target: float | None = None,
) -> Figure:
    return _share(key, label, map(test, chunks), target)
