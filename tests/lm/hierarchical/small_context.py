"""A small context to edit, and a model that fails while it does; not a test itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scope_rt.lm.hierarchical.cost import CostModel
from scope_rt.lm.hierarchical.editing import EditableContext
from scope_rt.lm.hierarchical.hierarchy import Hierarchy
from tests.lm.hierarchical.dense import small_cache, small_model

MODEL = small_model()
STRICT = Hierarchy(group=2, windows=(4, 3, None))
HIERARCHIES = (
    STRICT,
    Hierarchy(group=3, windows=(5, 4, 2)),
    Hierarchy(group=2, windows=(None,)),
    Hierarchy(group=2, windows=(4, 3, None), near_causal=True),
)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]


def editable(
    hierarchy: Hierarchy = STRICT,
    *,
    tokens: list[int] | None = None,
    chunk_leaves: int = 4,
    bit_equal: bool = False,
    cost: CostModel | None = None,
    undo_bytes: int = 0,
) -> EditableContext:
    made = EditableContext(
        MODEL,
        small_cache(hierarchy),
        chunk_leaves=chunk_leaves,
        bit_equal=bit_equal,
        cost=cost or CostModel(linear=1.0, quadratic=0.0),
        undo_bytes=undo_bytes,
    )
    if tokens:
        made.append(tokens)
    return made


def recomputed(of: EditableContext) -> EditableContext:
    """The same context, computed from nothing in one replay."""
    fresh = editable(of.cache.hierarchy, chunk_leaves=of.chunk_leaves)
    fresh.load(of.context)
    return fresh


@contextmanager
def model_raises_in_the_second_chunk() -> Iterator[None]:
    """Behind its first layer, so that rows of one layer are written."""
    raises = iter([False, True])

    def failing(*_: object) -> None:
        if next(raises):
            raise MemoryError

    hook = MODEL.blocks[1].register_forward_pre_hook(failing)
    with pytest.raises(MemoryError):
        yield
    hook.remove()
