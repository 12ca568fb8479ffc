"""How much sooner an edited context is whole again, next to what the cost formula promises.

Every speed-up of an edit is a ratio of two things that were timed one after the other in the same
round, on one thread. A decoded token is timed once, behind all edits: what its ratios compare it
with was not timed beside it, so they are rougher.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from scope_contracts.errors import CacheError
from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_lab.cache_peak import copied_bytes
from scope_lab.kv_bench.edit_times import (
    PROMISED_AT,
    PROMISED_LEAVES,
    EditTimes,
    SystemTimes,
    curve,
    promised,
    row,
)
from scope_lab.kv_bench.result import Effort, Part
from scope_lab.kv_bench.stopwatch import Stopwatch
from scope_rt.lm.hierarchical.cache import HierarchicalCache
from scope_rt.lm.hierarchical.calibration import calibrate
from scope_rt.lm.hierarchical.context import Collapse, Edit, Expand
from scope_rt.lm.hierarchical.cost import LEAST_GAIN
from scope_rt.lm.hierarchical.editing import EditableContext, EditReport
from scope_rt.lm.hierarchical.hierarchy import Hierarchy
from scope_rt.lm.hierarchical.node_model import NodeModel
from scope_rt.lm.models.multilevel import MultilevelConfig, MultilevelModel

CONFIG = MultilevelConfig(vocab_size=512, dim=64, num_layers=2, num_heads=2, ffn_dim=128)
GROUP, CHUNK_LEAVES = 32, 160
WINDOWED = Hierarchy(group=GROUP, windows=(256, 64, None))
FULL_ATTENTION = Hierarchy(group=GROUP, windows=(None, GROUP, None))
LEAVES_ALONE = Hierarchy(group=GROUP, windows=(None,))
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
    Effort.FULL: Scale(num_leaves=PROMISED_LEAVES, rounds=3),
}


def measure(effort: Effort) -> Part:
    """Time edits of a windowed hierarchy and of full attention."""
    scale = SCALES[effort]
    with _one_thread():
        windowed = time_system("hierarchical, windows", WINDOWED, scale)
        full = time_system("hierarchical, full attention", FULL_ATTENTION, scale)
        contiguous_s = _timed_decode(contiguous(scale))
    return Part(
        title="Hierarchical cache: edits of a long context",
        systems=tuple(row(system, contiguous_s) for system in (windowed, full)),
        curves=(curve((windowed, full)),),
        notes=(
            f"{scale.num_leaves} leaves and their summaries, groups of {GROUP}; a random model of "
            f"{CONFIG.num_layers} layers and {CONFIG.dim} channels, fp32, one thread",
            "every edit moves a gist: one collapse where the dirty part begins, one expand after; "
            "the caches were compared with a full recompute after every edit: equal bits",
            "contiguous is this model over the leaves alone: one level, whose view copies no row "
            f"({1e3 * contiguous_s:.2f} ms a token); x contiguous and x recompute are of "
            f"{DECODED_TOKENS} tokens, timed once",
            "peak: of a second cache, which is filled, edited and decoded to, and not timed",
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
            predicted=promised(fraction, cost, scale.num_leaves),
            measured=tuple(measured[fraction]),
            report=reports[fraction],
        )
        for fraction in fractions
    )
    undo, undo_kept_bytes = _timed_undo(edited, fresh, gist_at, scale)
    most_copied = largest_copy(edited, gist_at, scale)
    return SystemTimes(
        name=name,
        hierarchy=hierarchy,
        cost=cost,
        num_leaves=scale.num_leaves,
        max_leaves=edited.cache.max_leaves,
        edits=edits_times,
        undo=undo,
        undo_kept_bytes=undo_kept_bytes,
        recompute_s=median(recompute_s),
        token_s=_timed_decode(edited),
        num_bytes=edited.cache.num_bytes,
        copied_bytes=most_copied,
    )


class WatchedCache(HierarchicalCache):
    """Remembers the largest copy that a view of it made."""

    largest_copy = 0

    def view(self, layer: int) -> tuple[Tensor, ...]:
        shown = super().view(layer)
        own = [part for level in self.levels for plane in level.parts for part in plane]
        self.largest_copy = max(self.largest_copy, copied_bytes(shown, own))
        return shown


def largest_copy(edited: EditableContext, gist_at: int, scale: Scale) -> int:
    """What a cache at most copies together to show a layer.

    From a cache of its own, which is filled with the context, edited there and back, and decoded
    to: looking takes time, and a span that has summaries shows more levels than a leaf does.
    """
    hierarchy, room = edited.cache.hierarchy, scale.num_leaves + GROUP
    watched = _empty(edited.model, hierarchy, room, cache_type=WatchedCache)
    assert isinstance(watched.cache, WatchedCache)
    watched.load(edited.context)
    for edits in _there_and_back(PROMISED_AT[-1], gist_at, scale.num_leaves):
        watched.edit(edits)
    _timed_decode(watched)
    return watched.cache.largest_copy


def contiguous(scale: Scale) -> EditableContext:
    """The same model with no summaries, so that its rows lie and are read in one piece."""
    torch.manual_seed(0)
    model = MultilevelModel(CONFIG).eval()
    made = _empty(model, LEAVES_ALONE, scale.num_leaves)
    made.append(torch.randint(CONFIG.vocab_size, (scale.num_leaves,)).tolist())
    return made


def _empty(
    model: NodeModel,
    hierarchy: Hierarchy,
    num_leaves: int,
    *,
    undo_bytes: int = 0,
    cache_type: type[HierarchicalCache] = HierarchicalCache,
) -> EditableContext:
    row_format = RowFormat.full(
        heads=CONFIG.num_heads, head_dim=CONFIG.head_dim, dtype=DType.FLOAT32
    )
    cache = cache_type(
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
) -> tuple[EditTimes, int]:
    """And the most bytes of rows that were kept for it."""
    bound = 2 * edited.cache.num_bytes
    hierarchy = edited.cache.hierarchy
    undoable = _empty(edited.model, hierarchy, scale.num_leaves + GROUP, undo_bytes=bound)
    undoable.load(edited.context)
    assert undoable.replaced is not None
    measured, kept_bytes = [], 0
    for _ in range(scale.rounds):
        there, back = _there_and_back(0.5, gist_at, scale.num_leaves)
        undoable.edit(there)
        kept_bytes = max(kept_bytes, undoable.replaced.num_bytes)
        report, undo_s = _timed(undoable, back)
        kept_bytes = max(kept_bytes, undoable.replaced.num_bytes)
        measured.append(_recomputed(fresh, undoable) / undo_s)
    times = EditTimes(
        dirty_fraction=0.5, predicted=report.predicted_gain, measured=tuple(measured), report=report
    )
    return times, kept_bytes


def _timed_decode(edited: EditableContext) -> float:
    """Seconds of one token, decoded behind the context."""
    edited.bit_equal = False  # a token alone is its own chunk
    with Stopwatch() as watch:
        for token in range(DECODED_TOKENS):
            edited.append([token])
    return watch.seconds / DECODED_TOKENS


@contextmanager
def _one_thread() -> Iterator[None]:
    """Processor time is the time that passes only where one thread computes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
