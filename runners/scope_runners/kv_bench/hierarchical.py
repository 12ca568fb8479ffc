"""How much sooner an edited context is whole again, next to what the cost formula promises.

Every figure is a ratio of two things that were timed one after the other in the same round, on one
thread.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from scope_contracts.errors import CacheError
from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.kv_cache.hierarchical.cache import HierarchicalCache
from scope_rt.kv_cache.hierarchical.calibration import calibrate
from scope_rt.kv_cache.hierarchical.context import Collapse, Edit, Expand
from scope_rt.kv_cache.hierarchical.cost import LEAST_GAIN, CostModel, speed_up
from scope_rt.kv_cache.hierarchical.editing import EditableContext, EditReport
from scope_rt.kv_cache.hierarchical.hierarchy import Hierarchy
from scope_rt.kv_cache.hierarchical.node_model import NodeModel
from scope_rt.models.multilevel import MultilevelConfig, MultilevelModel
from scope_runners.kv_bench.result import Curve, Effort, Line, Part, Quality, SystemResult
from scope_runners.kv_bench.stopwatch import Stopwatch

CONFIG = MultilevelConfig(vocab_size=512, dim=64, num_layers=2, num_heads=2, ffn_dim=128)
GROUP, CHUNK_LEAVES = 32, 160
WINDOWED = Hierarchy(group=GROUP, windows=(256, 64, None))
FULL_ATTENTION = Hierarchy(group=GROUP, windows=(None, GROUP, None))
PROMISED_AT = (0.5, 0.2, 0.1, 0.05)
"""Dirty fractions at which the formula is checked."""
EARLY_EDIT = 0.9
"""A dirty fraction that does not pay, so that everything is computed anew."""
DECODED_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How long a context, and how often each edit is timed."""

    num_leaves: int
    rounds: int


SCALES: Mapping[Effort, Scale] = {
    Effort.QUICK: Scale(num_leaves=3_200, rounds=1),
    Effort.FULL: Scale(num_leaves=16_000, rounds=3),
}


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
    edits: tuple[EditTimes, ...]
    undo: EditTimes
    """Half of the context is dirty, and its rows are still kept."""
    recompute_s: float
    token_s: float
    """One decoded token at the end of the context."""
    num_bytes: int


def measure(effort: Effort) -> Part:
    """Time edits of a windowed hierarchy and of full attention."""
    scale = SCALES[effort]
    with _one_thread():
        windowed = time_system("hierarchical, windows", WINDOWED, scale)
        full = time_system("hierarchical, full attention", FULL_ATTENTION, scale)
    contiguous_s = full.token_s
    return Part(
        title="Hierarchical cache: edits of a long context",
        systems=tuple(_row(system, contiguous_s) for system in (windowed, full)),
        curves=(_curve((windowed, full)),),
        notes=(
            f"{scale.num_leaves} leaves and their summaries, groups of {GROUP}; a random model of "
            f"{CONFIG.num_layers} layers and {CONFIG.dim} channels, fp32, one thread",
            "every edit moves a gist: one collapse where the dirty part begins, one expand after; "
            "the caches were compared with a full recompute after every edit: equal bits",
            f"where it fails: the earliest edit counts, however small. A dirty fraction of "
            f"{EARLY_EDIT:g} promises {1 / EARLY_EDIT:.2f}x; below {LEAST_GAIN}x everything is "
            "computed anew",
        ),
    )


def time_system(name: str, hierarchy: Hierarchy, scale: Scale) -> SystemTimes:
    """Calibrate, then time every edit beside a full recompute, in turns.

    Raises:
        CacheError: a cache was not what a full recompute makes it.
    """
    torch.manual_seed(0)
    model = MultilevelModel(CONFIG).eval()
    edited, fresh = (_empty(model, hierarchy, scale.num_leaves + GROUP) for _ in range(2))
    tokens = torch.randint(CONFIG.vocab_size, (scale.num_leaves + GROUP - 1,)).tolist()
    cost = calibrate(edited, tokens, clock=time.process_time)
    gist_at = (scale.num_leaves - GROUP) // GROUP * GROUP
    edited.edit([Collapse(gist_at)])  # from here on the number of leaves stays
    fractions = (*PROMISED_AT, EARLY_EDIT)
    measured: dict[float, list[float]] = {fraction: [] for fraction in fractions}
    reports: dict[float, EditReport] = {}
    recompute_s: list[float] = []
    before = edited.cache.digest()
    for _ in range(scale.rounds):
        for fraction in fractions:
            there, back = _there_and_back(fraction, gist_at, scale.num_leaves)
            reports[fraction], there_s = _timed(edited, there)
            recompute_s.append(_recomputed(fresh, edited))
            _, back_s = _timed(edited, back)
            measured[fraction] += [recompute_s[-1] / there_s, recompute_s[-1] / back_s]
            if edited.cache.digest() != before:
                raise CacheError("an edit and its inverse did not give the same cache again")
    edits_times = tuple(
        EditTimes(
            dirty_fraction=fraction,
            predicted=_promised(fraction, cost, scale.num_leaves),
            measured=tuple(measured[fraction]),
            report=reports[fraction],
        )
        for fraction in fractions
    )
    return SystemTimes(
        name=name,
        hierarchy=hierarchy,
        cost=cost,
        num_leaves=scale.num_leaves,
        edits=edits_times,
        undo=_timed_undo(edited, fresh, gist_at, scale),
        recompute_s=median(recompute_s),
        token_s=_timed_decode(edited),
        num_bytes=edited.cache.num_bytes,
    )


def _empty(
    model: NodeModel, hierarchy: Hierarchy, num_leaves: int, *, undo_bytes: int = 0
) -> EditableContext:
    row_format = RowFormat.full(
        heads=CONFIG.num_heads, head_dim=CONFIG.head_dim, dtype=DType.FLOAT32
    )
    cache = HierarchicalCache(
        row_format,
        hierarchy,
        num_layers=CONFIG.num_layers,
        max_leaves=num_leaves + DECODED_TOKENS,
        device=torch.device("cpu"),
    )
    return EditableContext(
        model, cache, chunk_leaves=CHUNK_LEAVES, bit_equal=True, undo_bytes=undo_bytes
    )


def _there_and_back(fraction: float, gist_at: int, num_leaves: int) -> Iterator[list[Edit]]:
    """The gist moves to where the dirty part begins, and back: the number of leaves stays."""
    start = round((1 - fraction) * num_leaves) // GROUP * GROUP
    yield [Expand(gist_at), Collapse(start)]
    yield [Expand(start), Collapse(gist_at)]


def _timed(context: EditableContext, edits: list[Edit]) -> tuple[EditReport, float]:
    with Stopwatch() as watch:
        report = context.edit(edits)
    return report, watch.seconds


def _recomputed(fresh: EditableContext, edited: EditableContext) -> float:
    """Seconds to compute the context of `edited` from nothing; both must be equal then."""
    fresh.clear()
    with Stopwatch() as watch:
        fresh.load(edited.context)
    if fresh.cache.digest() != edited.cache.digest():
        raise CacheError("an edited cache differs from a full recompute of its context")
    return watch.seconds


def _timed_undo(
    edited: EditableContext, fresh: EditableContext, gist_at: int, scale: Scale
) -> EditTimes:
    bound = 2 * edited.cache.num_bytes
    hierarchy = edited.cache.hierarchy
    undoable = _empty(edited.model, hierarchy, scale.num_leaves + GROUP, undo_bytes=bound)
    undoable.load(edited.context)
    measured = []
    for _ in range(scale.rounds):
        there, back = _there_and_back(0.5, gist_at, scale.num_leaves)
        undoable.edit(there)
        report, undo_s = _timed(undoable, back)
        measured.append(_recomputed(fresh, undoable) / undo_s)
    return EditTimes(
        dirty_fraction=0.5, predicted=report.predicted_gain, measured=tuple(measured), report=report
    )


def _timed_decode(edited: EditableContext) -> float:
    """Seconds of one token, decoded behind the context."""
    edited.bit_equal = False  # a token alone is its own chunk
    with Stopwatch() as watch:
        for token in range(DECODED_TOKENS):
            edited.append([token])
    return watch.seconds / DECODED_TOKENS


def _promised(fraction: float, cost: CostModel, num_leaves: int) -> float:
    """What the formula says, with the fallback: below `LEAST_GAIN` it is a full recompute."""
    gain = speed_up(fraction, cost.quadratic_share(num_leaves))
    return gain if gain >= LEAST_GAIN else 1.0


def _row(system: SystemTimes, contiguous_s: float) -> SystemResult:
    share = system.cost.quadratic_share(system.num_leaves)
    worst = max(abs(edit.off_by) for edit in system.edits if edit.dirty_fraction in PROMISED_AT)
    speed_ups = tuple(
        Quality(name=f"speed-up at f={edit.dirty_fraction:g}", value=edit.speed_up, unit="x")
        for edit in system.edits
    )
    latest = next(edit.report for edit in system.edits if edit.dirty_fraction == PROMISED_AT[-1])
    return SystemResult(
        name=system.name,
        bytes_per_token=system.num_bytes / (system.num_leaves + GROUP + DECODED_TOKENS),
        peak_bytes=system.num_bytes,
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
        ),
    )


def _curve(systems: tuple[SystemTimes, ...]) -> Curve:
    lines = []
    for system in systems:
        fractions = sorted(edit.dirty_fraction for edit in system.edits)
        seen = {edit.dirty_fraction: edit.speed_up for edit in system.edits}
        finer = [0.04 + 0.96 * step / 96 for step in range(97)]
        share = system.cost.quadratic_share(system.num_leaves)
        measured = tuple((fraction, seen[fraction]) for fraction in fractions)
        formula = tuple((f, _promised(f, system.cost, system.num_leaves)) for f in finer)
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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processor time is the time that passes only where one thread computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
