"""What one part of the benchmark found is a value; tables, JSON and plots are made from it alone.

Every part is a module here with `measure(effort: Effort) -> Part`. A figure that a system does not
have is None, and a system that this machine cannot run says why instead of showing numbers.
"""

from dataclasses import dataclass
from enum import StrEnum

from scope_contracts.errors import CacheError


class Effort(StrEnum):
    """How long a part may take."""

    QUICK = "quick"
    """Seconds: enough to see that everything runs; figures are rough."""
    FULL = "full"
    """Minutes: the figures that are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One figure of quality: `PSNR to the full cache`, 41.2, `dB`. Shares have the unit `%`."""

    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult:
    """One cache system on one model."""

    name: str
    bytes_per_token: float | None = None
    """Over all layers, scales and scores included."""
    peak_bytes: int | None = None
    """The most that the cache held during the measurement, and its largest copy of a layer: rows
    that are decoded or gathered to be shown are there while that layer's attention runs.
    """
    throughput_vs_recompute: float | None = None
    """Tokens (or frames) a second, over those of computing the whole past anew each step."""
    throughput_vs_contiguous: float | None = None
    """... over those of a plain contiguous (for video: ring) cache."""
    quality: tuple[Quality, ...] = ()
    notes: tuple[str, ...] = ()
    cannot_run: str = ""
    """Why this machine cannot run it; empty where it ran."""

    def __post_init__(self) -> None:
        figures = (
            self.bytes_per_token,
            self.throughput_vs_recompute,
            self.throughput_vs_contiguous,
        )
        measured = any(figure is not None for figure in figures) or bool(self.quality)
        if self.cannot_run and measured:
            raise CacheError(f"{self.name} cannot run here and yet has figures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a plot: `(x, y)` in order of x; `is_model` draws it dashed, without marks."""

    name: str
    points: tuple[tuple[float, float], ...]
    is_model: bool = False
    """Whether it is a formula's, not a measurement's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One panel of a picture."""

    key: str
    """The picture's file name without its ending; curves that share it are its panels."""
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """All that one module measured."""

    title: str
    systems: tuple[SystemResult, ...] = ()
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()
    """What holds for all rows: the model, the lengths, what was compared with what."""
