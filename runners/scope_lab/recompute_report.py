"""What the recompute experiment found, as values, a table and one sentence for each context.

A change is reported only where its 95% confidence interval over prompts (or rounds of a plan)
leaves out zero.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scope_lab.recompute_quality import Quality
from scope_rt.control.recompute import RecomputeMode

SINGLE = "single"
_STUDENT_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Two-sided 95% quantiles by degrees of freedom."""
_STUDENT_T_BEYOND = 2.23


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way to keep the cache; a `context_frames` of 0 (latent frames) is the clean pass."""

    context_frames: int = 0
    mode: RecomputeMode | None = None
    every: int | None = None

    @property
    def cadence(self) -> str:
        if self.mode is None:
            return "clean pass"
        return "never" if self.mode is RecomputeMode.R1 else f"every {self.every}"

    @property
    def anchor(self) -> str:
        anchors = {RecomputeMode.R0A: "decoded (R0a)", RecomputeMode.R0: "latent (R0)"}
        return "" if self.mode is None else anchors.get(self.mode, "(R1)")

    def __str__(self) -> str:
        return " ".join(filter(None, (self.cadence, self.anchor)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One stream of one prompt in `single`; times without the first chunk of the epoch."""

    quality: Quality
    generator_calls: float
    """A chunk, on average."""
    generate_ms: float
    """A chunk, on average."""
    frames_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant: a sample for each prompt, and frames/s of every round by plan."""

    variant: Variant
    samples: tuple[Sample, ...]
    plans: Mapping[str, tuple[float, ...]]

    def mean(self, figure: Callable[[Sample], float]) -> float:
        return statistics.fmean(map(figure, self.samples))

    def median(self, figure: Callable[[Sample], float]) -> float:
        return statistics.median(map(figure, self.samples))

    @property
    def speeds(self) -> dict[str, tuple[float, ...]]:
        """Frames/s by plan, `single` first."""
        return {SINGLE: tuple(s.frames_per_s for s in self.samples), **self.plans}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """All variants over the same prompts, of `num_chunks` chunks each."""

    num_chunks: int
    rows: tuple[Row, ...]

    def pairs(self) -> list[tuple[Row, Row]]:
        """Every 1 and every 2 with the decoded anchor, for each context."""
        decoded = {
            (row.variant.context_frames, row.variant.every): row
            for row in self.rows
            if row.variant.mode is RecomputeMode.R0A
        }
        return [
            (row, decoded[context, 2])
            for (context, every), row in decoded.items()
            if every == 1 and (context, 2) in decoded
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The mean of paired differences and the half width of its 95% confidence interval."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Change":
        """Of differences that are numbers; infinitely wide for less than two of them."""
        finite = [difference for difference in differences if math.isfinite(difference)]
        if len(finite) < 2:
            return cls(mean=statistics.fmean(finite) if finite else 0.0, half_width=math.inf)
        quantile = _STUDENT_T.get(len(finite) - 1, _STUDENT_T_BEYOND)
        error = statistics.stdev(finite) / math.sqrt(len(finite))
        return cls(mean=statistics.fmean(finite), half_width=quantile * error)

    @property
    def is_clear(self) -> bool:
        return abs(self.mean) > self.half_width


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one figure changed, as a share: in points of a share, or in percent of what it was."""

    name: str
    unit: str
    change: Change
    more_is_better: bool = True

    @property
    def is_gain(self) -> bool:
        return self.change.is_clear and (self.change.mean > 0) is self.more_is_better

    @property
    def is_loss(self) -> bool:
        return self.change.is_clear and not self.is_gain

    def __str__(self) -> str:
        mean, half_width = 100 * self.change.mean, 100 * self.change.half_width
        if math.isinf(half_width):
            return f"{self.name}: too few to tell"
        noise = "" if self.change.is_clear else " (within noise)"
        return f"{self.name} {mean:+.1f} ± {half_width:.1f} {self.unit}{noise}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Every 2 instead of every 1: quality by figure, and frames/s by plan."""

    context_frames: int
    quality: tuple[Finding, ...]
    speed: tuple[Finding, ...]

    @classmethod
    def of(cls, every_1: Row, every_2: Row) -> "Verdict":
        pairs = [
            (a.quality, b.quality) for a, b in zip(every_1.samples, every_2.samples, strict=True)
        ]
        before, after = every_1.speeds, every_2.speeds
        return cls(
            context_frames=every_1.variant.context_frames,
            quality=(
                _in_points("colours", [b.colours - a.colours for a, b in pairs]),
                _in_points("shapes", [b.shapes - a.shapes for a, b in pairs]),
                _in_points("motion", [b.motion - a.motion for a, b in pairs]),
                _in_percent("flicker", [(a.flicker, b.flicker) for a, b in pairs], better=False),
            ),
            speed=tuple(
                _in_percent(plan, list(zip(before[plan], after[plan], strict=True)))
                for plan in before
            ),
        )

    @property
    def loses_quality(self) -> bool:
        return any(finding.is_loss for finding in self.quality)

    @property
    def gains_speed(self) -> bool:
        return any(finding.is_gain for finding in self.speed)

    def sentence(self) -> str:
        loss = "loses quality" if self.loses_quality else "shows no loss of quality"
        gain = "gains speed" if self.gains_speed else "shows no gain in speed"
        return (
            f"Context {self.context_frames}: every 2 instead of every 1 {loss} "
            f"({', '.join(map(str, self.quality))}) and {gain} "
            f"(frames/s, {', '.join(map(str, self.speed))})."
        )


def _in_points(name: str, differences: Sequence[float]) -> Finding:
    return Finding(name=name, unit="points", change=Change.of(differences))


def _in_percent(name: str, pairs: Sequence[tuple[float, float]], *, better: bool = True) -> Finding:
    shares = [after / before - 1 for before, after in pairs if before]
    return Finding(name=name, unit="%", change=Change.of(shares), more_is_better=better)


def verdicts(experiment: Experiment) -> list[Verdict]:
    """One for each context in which both cadences were run."""
    return [Verdict.of(every_1, every_2) for every_1, every_2 in experiment.pairs()]


def table(experiment: Experiment) -> str:
    """A markdown table and the sentences, for a person at a terminal."""
    plans = list(experiment.rows[0].plans)
    heads = ["context", "cache is kept by", "calls", "colours", "shapes", "motion", "flicker"]
    heads += ["PSNR dB", "generate ms", *(f"frames/s {plan}" for plan in (SINGLE, *plans))]
    rows = [heads, ["---:", "---", *["---:"] * (len(heads) - 2)]]
    rows += [_cells(row, plans) for row in experiment.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, cells, widths)) + " |" for cells in rows]
    prompts = len(experiment.rows[0].samples)
    return "\n".join(
        [
            f"{prompts} prompts of {experiment.num_chunks} chunks; quality: means; speed: medians. "
            "Motion: measured over named speed.",
            "Flicker: picture difference at chunk borders over that inside chunks. PSNR: to the "
            "first row.",
            "",
            *lines,
            "",
            *(verdict.sentence() for verdict in verdicts(experiment)),
        ]
    )


def _cells(row: Row, plans: Sequence[str]) -> list[str]:
    psnr_db = row.mean(lambda sample: sample.quality.psnr_db)
    return [
        str(row.variant.context_frames or ""),
        str(row.variant),
        f"{row.mean(lambda sample: sample.generator_calls):.2f}",
        f"{row.mean(lambda sample: sample.quality.colours):.1%}",
        f"{row.mean(lambda sample: sample.quality.shapes):.1%}",
        f"{row.mean(lambda sample: sample.quality.motion):.2f}",
        f"{row.mean(lambda sample: sample.quality.flicker):.2f}",
        "" if math.isinf(psnr_db) else f"{psnr_db:.1f}",
        f"{row.median(lambda sample: sample.generate_ms):.1f}",
        *(
            f"{statistics.median(row.speeds[plan]):.1f}" if plan in row.speeds else ""
            for plan in (SINGLE, *plans)
        ),
    ]
