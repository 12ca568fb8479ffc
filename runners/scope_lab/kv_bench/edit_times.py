"""What timed edits become in a table and a plot, and which of the promised speed-ups they show."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from scope_lab.kv_bench.result import Curve, Line, Quality, SystemResult
from scope_rt.lm.hierarchical.cost import LEAST_GAIN, CostModel, speed_up
from scope_rt.lm.hierarchical.editing import EditReport
from scope_rt.lm.hierarchical.hierarchy import Hierarchy

PROMISED_AT = (0.5, 0.2, 0.1, 0.05)
"""Dirty fractions at which the formula is checked."""
PROMISED_WITHIN = 0.25
"""Of the formula, at each of them."""
PROMISED_LEAST: Mapping[float, float] = {0.1: 5.0, 0.05: 10.0}
"""Speed-ups at two of them, in a context of `PROMISED_LEAVES`."""
PROMISED_LEAVES = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EditTimes:
    """One dirty fraction: what was promised, what was seen, in every round."""

    dirty_fraction: float
    predicted: float
    measured: tuple[float, ...]
    """Time of a full recompute over that of the edit, round by round."""
    report: EditReport
    """Of the last edit."""

    @property
    def speed_up(self) -> float:
        return median(self.measured)

    @property
    def off_by(self) -> float:
        """How far the measurement is from the formula, as a share of the formula."""
        return self.speed_up / self.predicted - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemTimes:
    """All that was timed under one hierarchy."""

    name: str
    hierarchy: Hierarchy
    cost: CostModel
    num_leaves: int
    max_leaves: int
    """For which there is room."""
    edits: tuple[EditTimes, ...]
    undo: EditTimes
    """Half of the context is dirty, and its rows are still kept."""
    recompute_s: float
    token_s: float
    """One decoded token at the end of the context."""
    num_bytes: int
    copied_bytes: int
    """By one view of a layer, whose levels lie apart: the most, of any edit and decoded token."""
    undo_kept_bytes: int
    """The most rows that were kept for `undo`, which no other edit has."""


def promised(fraction: float, cost: CostModel, num_leaves: int) -> float:
    """What the formula says, with the fallback: below `LEAST_GAIN` it is a full recompute."""
    gain = speed_up(fraction, cost.quadratic_share(num_leaves))
    return gain if gain >= LEAST_GAIN else 1.0


def row(system: SystemTimes, contiguous_s: float) -> SystemResult:
    """`contiguous_s` is what a token costs in a plain contiguous cache of as many leaves."""
    share = system.cost.quadratic_share(system.num_leaves)
    worst = max(abs(edit.off_by) for edit in system.edits if edit.dirty_fraction in PROMISED_AT)
    speed_ups = tuple(
        Quality(name=f"speed-up at f={edit.dirty_fraction:g}", value=edit.speed_up, unit="x")
        for edit in system.edits
    )
    latest = next(edit.report for edit in system.edits if edit.dirty_fraction == PROMISED_AT[-1])
    return SystemResult(
        name=system.name,
        bytes_per_token=system.num_bytes / system.max_leaves,
        peak_bytes=system.num_bytes + system.copied_bytes,
        throughput_vs_recompute=system.recompute_s / system.token_s,
        throughput_vs_contiguous=contiguous_s / system.token_s,
        quality=(
            *speed_ups,
            Quality(name="undo of half the context", value=system.undo.speed_up, unit="x"),
            Quality(name="worst distance to the formula", value=100 * worst, unit="%"),
        ),
        notes=(
            f"windows {system.hierarchy.windows}; measured quadratic share b = {share:.2f}",
            f"at f={PROMISED_AT[-1]:g} an edit of one group dirties {latest.temporal_ratio:.1%} of "
            f"all nodes in time and {latest.spatial_ratio:.2%} in space",
            f"undo keeps {system.undo_kept_bytes:,} bytes of replaced rows, which no peak counts",
            _verdict(system),
        ),
    )


def _verdict(system: SystemTimes) -> str:
    """Which of the promised speed-ups this run showed."""
    if system.num_leaves < PROMISED_LEAVES:
        return f"too short for the promised speed-ups, which are for {PROMISED_LEAVES:,} leaves"
    met: list[str] = []
    missed: list[str] = []
    for edit in system.edits:
        if edit.dirty_fraction in PROMISED_AT:
            text = f"the formula at f={edit.dirty_fraction:g} ({edit.off_by:+.0%})"
            (met if abs(edit.off_by) <= PROMISED_WITHIN else missed).append(text)
        if edit.dirty_fraction in PROMISED_LEAST:
            least = PROMISED_LEAST[edit.dirty_fraction]
            text = f"{least:g}x at f={edit.dirty_fraction:g} ({edit.speed_up:.1f}x)"
            (met if edit.speed_up >= least else missed).append(text)
    return (
        f"promised are {PROMISED_WITHIN:.0%} around the formula, and least speed-ups; "
        f"met: {', '.join(met) or 'none'}; missed: {', '.join(missed) or 'none'}"
    )


def curve(systems: tuple[SystemTimes, ...]) -> Curve:
    """What was measured, and the formula at each system's measured quadratic share."""
    lines = []
    for system in systems:
        fractions = sorted(edit.dirty_fraction for edit in system.edits)
        seen = {edit.dirty_fraction: edit.speed_up for edit in system.edits}
        finer = [0.04 + 0.96 * step / 96 for step in range(97)]
        share = system.cost.quadratic_share(system.num_leaves)
        measured = tuple((fraction, seen[fraction]) for fraction in fractions)
        formula = tuple((f, promised(f, system.cost, system.num_leaves)) for f in finer)
        lines.append(Line(name=f"{system.name}, measured", points=measured))
        name = f"{system.name}, formula at b={share:.2f}"
        lines.append(Line(name=name, points=formula, is_model=True))
    return Curve(
        key="hierarchical_speed_up",
        title="An edit against a full recompute",
        x_label="dirty fraction f of the context",
        y_label="speed-up",
        lines=tuple(lines),
        log_x=True,
        log_y=True,
    )
