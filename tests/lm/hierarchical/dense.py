"""A small multi-level model, and what it computes over all nodes at once with a dense mask."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from scope_contracts.row_format import CodecKind, RowFormat
from scope_rt.lm.hierarchical.cache import HierarchicalCache
from scope_rt.lm.hierarchical.context import WorkingContext
from scope_rt.lm.hierarchical.editing import EditableContext
from scope_rt.lm.hierarchical.hierarchy import Hierarchy
from scope_rt.lm.models.multilevel import MultilevelConfig, MultilevelModel
from scope_rt.tensors import NAMES

CONFIG = MultilevelConfig(vocab_size=11, dim=8, num_layers=2, num_heads=2, ffn_dim=12)


def small_model(dtype: torch.dtype = torch.float64) -> MultilevelModel:
    torch.manual_seed(5)
    return MultilevelModel(CONFIG).to(dtype).eval()


def small_cache(
    hierarchy: Hierarchy,
    *,
    max_leaves: int = 200,
    dtype: torch.dtype = torch.float64,
    codec: CodecKind = CodecKind.IDENTITY,
) -> HierarchicalCache:
    row_format = RowFormat.full(
        heads=CONFIG.num_heads, head_dim=CONFIG.head_dim, dtype=NAMES[dtype], codec=codec
    )
    return HierarchicalCache(
        row_format,
        hierarchy,
        num_layers=CONFIG.num_layers,
        max_leaves=max_leaves,
        device=torch.device("cpu"),
    )


def seen_by(hierarchy: Hierarchy, node: tuple[int, int], num_leaves: int) -> set[tuple[int, int]]:
    """All `(level, index)` that a node sees, from the rules in words."""
    (level, index), group, seen = node, hierarchy.group, {node}
    if level > 0:
        return seen | {(level - 1, index * group + child) for child in range(group)}
    end = index + 1
    for above, window in enumerate(hierarchy.windows):
        step = 1 if above == hierarchy.top else group
        first = next(n for n in range(0, end + 1, step) if window is None or end - n <= window)
        seen |= {(above, n) for n in range(first, end)}
        if first % group:
            break  # the top level: what lies before is forgotten
        end = first // group
    if hierarchy.near_causal:
        for above in range(1, hierarchy.top + 1):
            own = index // group**above
            if (own + 1) * group**above <= num_leaves:
                seen.add((above, own))
    return seen


@dataclass
class DenseAttention:
    """Softmax over all nodes at once under a mask; keeps every layer's K and V."""

    seen: Tensor
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        assert layer == len(self.rows)
        self.rows.append((k_BTHD, v_BTHD))
        scores = torch.einsum("bqhd,bkhd->bhqk", q_BTHD, k_BTHD) / q_BTHD.shape[-1] ** 0.5
        scores = scores.masked_fill(~self.seen, float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v_BTHD)


@torch.no_grad()
def dense(
    model: MultilevelModel, hierarchy: Hierarchy, context: WorkingContext
) -> tuple[Tensor, DenseAttention]:
    """The outputs of all nodes, and their K/V, computed in one piece."""
    runs = tuple(map(range, hierarchy.counts(context.num_leaves)))
    nodes = [(level, index) for level, run in enumerate(runs) for index in run]
    seen = torch.tensor(
        [
            [other in seen_by(hierarchy, node, context.num_leaves) for other in nodes]
            for node in nodes
        ]
    )
    attend = DenseAttention(seen)
    return model(context, runs, attend), attend


def worst_difference(
    model: MultilevelModel, hierarchy: Hierarchy, editable: EditableContext
) -> float:
    """Of every row in the cache and the last output, against the dense computation."""
    outputs, attend = dense(model, hierarchy, editable.context)
    counts = hierarchy.counts(editable.context.num_leaves)
    worst = float((editable.last_leaf - outputs[counts[0] - 1]).abs().max())
    for layer, planes in enumerate(attend.rows):
        stored = [
            store.read(layer, slice(0, count))
            for store, count in zip(editable.cache.levels, counts, strict=True)
        ]
        for want, got in zip(planes, zip(*stored, strict=True), strict=True):
            worst = max(worst, float((torch.cat(got, dim=1) - want).abs().max()))
    return worst
