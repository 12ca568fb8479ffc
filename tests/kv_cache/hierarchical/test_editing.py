import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_contracts.errors import CacheError, UserInputError
from scope_rt.kv_cache.hierarchical.calibration import calibrate
from scope_rt.kv_cache.hierarchical.context import Collapse, Edit, Expand, Replace, WorkingContext
from scope_rt.kv_cache.hierarchical.cost import CostModel
from scope_rt.kv_cache.hierarchical.editing import EditableContext
from scope_rt.kv_cache.hierarchical.hierarchy import Hierarchy
from tests.kv_cache.hierarchical.dense import small_cache, small_model, worst_difference

MODEL = small_model()
MODEL_FP32 = small_model(torch.float32)
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


def some_edits(context: WorkingContext, draw: random.Random, most: int = 3) -> list[Edit]:
    """Edits that fit, one after the other."""
    edits: list[Edit] = []
    for _ in range(draw.randint(1, most)):
        level = draw.choice((1, 1, 2))
        span = context.group**level
        gists = context.starts[context.levels > 0].tolist()
        wanted: list[Edit] = [
            Collapse(draw.randrange(max(1, context.tokens.numel() // span)) * span, level),
            Replace(draw.randrange(context.tokens.numel()), (draw.randrange(11),)),
        ]
        if gists:
            wanted.append(Expand(draw.choice(gists)))
        edit = draw.choice(wanted)
        try:
            context = context.edited([edit])
        except UserInputError:
            continue
        edits.append(edit)
    return edits


@settings(max_examples=24, deadline=None)
@given(
    hierarchy=st.sampled_from(HIERARCHIES),
    seed=st.integers(0, 10_000),
    bit_equal=st.booleans(),
    undo=st.booleans(),
)
def test_after_any_edits_every_row_is_that_of_a_dense_full_recompute(
    hierarchy: Hierarchy, seed: int, bit_equal: bool, undo: bool
) -> None:
    draw = random.Random(seed)
    chunk = hierarchy.group**2
    undo_bytes = 20_000 if undo else 0
    made = editable(hierarchy, chunk_leaves=chunk, bit_equal=bit_equal, undo_bytes=undo_bytes)
    made.append([draw.randrange(11) for _ in range(draw.randint(4, 20))])
    for _ in range(4):
        if draw.random() < 0.5:
            made.edit(some_edits(made.context, draw))
        else:
            made.append([draw.randrange(11) for _ in range(draw.randint(1, 3))])
    assert worst_difference(MODEL, hierarchy, made) < 1e-10
    if bit_equal:
        assert made.cache.digest() == recomputed(made).cache.digest()


def test_without_rolling_back_far_enough_the_rows_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near = HIERARCHIES[-1]
    strictly = lambda self, prefix, *, old_leaves, new_leaves: prefix  # noqa: E731
    monkeypatch.setattr(Hierarchy, "rollback", strictly)
    made = editable(near, tokens=TOKENS)
    made.edit([Replace(14, (0,))])
    assert worst_difference(MODEL, near, made) > 1e-3


@pytest.mark.parametrize("hierarchy", HIERARCHIES)
def test_an_edit_on_the_chunk_grid_gives_the_bits_of_a_full_recompute(
    hierarchy: Hierarchy,
) -> None:
    chunk = hierarchy.group**2
    tokens = TOKENS[: 5 * chunk]
    made = editable(hierarchy, tokens=tokens, chunk_leaves=chunk)
    report = made.edit([Replace(2 * chunk, (0,))])
    assert report.computed_leaves == len(tokens) - 2 * chunk
    fresh = recomputed(made)
    assert made.cache.digest() == fresh.cache.digest()
    assert torch.equal(made.last_leaf, fresh.last_leaf)


def test_token_by_token_is_the_same_as_at_once() -> None:
    made = editable(tokens=TOKENS[:13])
    stepped = editable()
    for token in TOKENS[:13]:
        stepped.append([token])
    assert worst_difference(MODEL, STRICT, stepped) < 1e-10
    torch.testing.assert_close(made.last_leaf, stepped.last_leaf, rtol=0, atol=1e-10)


def test_the_earliest_edit_of_a_batch_is_the_only_rollback() -> None:
    made = editable(tokens=TOKENS)
    report = made.edit([Collapse(20), Collapse(12), Collapse(14), Collapse(12, 2)])
    assert report.first_changed_leaf == report.first_dirty_leaf == 12
    assert report.num_leaves == 24 - 3 - 1
    assert report.changed_runs == 2
    assert report.computed_leaves == report.num_leaves - 12
    assert worst_difference(MODEL, STRICT, made) < 1e-10


def test_edits_that_cancel_compute_nothing() -> None:
    made = editable(tokens=TOKENS)
    before, written = made.cache.digest(), made.cache.counters.rows_written
    report = made.edit([Collapse(4), Expand(4)])
    assert report.computed_leaves == report.changed_runs == 0
    assert report.spatial_ratio == report.temporal_ratio == 0
    assert made.cache.counters.rows_written == written
    assert made.cache.digest() == before


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_what_an_edit_dirties_in_space_is_part_of_what_it_dirties_in_time(seed: int) -> None:
    draw = random.Random(seed)
    made = editable(tokens=TOKENS)
    report = made.edit(some_edits(made.context, draw))
    assert 0 <= report.spatial_ratio <= report.temporal_ratio <= 1


def test_the_invalidation_ratios_of_one_replaced_token() -> None:
    made = editable(tokens=TOKENS)  # 24 leaves, 12 LOD1, 6 LOD2
    report = made.edit([Replace(16, (0,))])
    assert report.spatial_ratio == pytest.approx(3 / 42)
    assert report.temporal_ratio == pytest.approx((8 + 4 + 2) / 42)


def test_an_early_edit_falls_back_to_a_full_recompute_and_is_counted() -> None:
    made = editable(tokens=TOKENS)
    late = made.edit([Replace(20, (0,))])
    assert not late.full_recompute
    assert late.predicted_gain == pytest.approx(6)
    early = made.edit([Replace(3, (0,))])
    assert early.full_recompute
    assert early.predicted_gain == pytest.approx(24 / 21)
    assert early.computed_leaves == 24
    assert made.counters.full_recomputes == 1
    assert worst_difference(MODEL, STRICT, made) < 1e-10
    dear = editable(tokens=TOKENS, cost=CostModel(linear=0.0, quadratic=1.0))
    assert dear.edit([Replace(12, (0,))]).predicted_gain == pytest.approx(4 / 3)
    assert dear.edit([Replace(9, (0,))]).full_recompute


def test_undo_takes_the_old_blocks_back() -> None:
    made = editable(tokens=TOKENS, undo_bytes=1 << 20)
    before = made.cache.digest()
    made.edit([Collapse(8)])
    assert made.cache.digest() != before
    computed = made.counters.computed_leaves
    undone = made.edit([Expand(8)])
    assert made.cache.digest() == before
    assert undone.reused_leaves == 12  # blocks 8..11, 12..15, 16..19; the last is computed
    assert made.counters.computed_leaves - computed == 4
    redone = made.edit([Collapse(8)])
    assert redone.reused_leaves == 12
    assert made.cache.counters.prefix_hits == made.counters.reused_leaves == 24
    assert worst_difference(MODEL, STRICT, made) < 1e-10


def test_an_undo_off_the_block_grid_counts_the_leaves_that_it_saved() -> None:
    made = editable(tokens=TOKENS, undo_bytes=1 << 20)
    made.edit([Collapse(6)])
    computed = made.counters.computed_leaves
    undone = made.edit([Expand(6)])
    assert undone.first_dirty_leaf == 6
    assert undone.reused_leaves == 14  # 6, 7 and blocks 8..11, 12..15, 16..19
    assert made.cache.counters.prefix_hits == made.counters.reused_leaves == 14
    assert made.counters.computed_leaves - computed == undone.computed_leaves == 4
    assert worst_difference(MODEL, STRICT, made) < 1e-10


def block_bytes() -> int:
    """Of 4 leaves and what is above them."""
    rows = small_cache(STRICT)
    return sum(rows.format.bytes_per_row * rows.num_layers * count for count in STRICT.counts(4))


def test_what_undo_may_keep_is_bounded_in_bytes() -> None:
    for max_bytes, kept in ((2 * block_bytes(), 2), (block_bytes() - 1, 0)):
        made = editable(tokens=TOKENS, undo_bytes=max_bytes)
        made.edit([Collapse(0)])
        assert made.replaced is not None
        assert (len(made.replaced), made.replaced.num_bytes) == (kept, kept * block_bytes())
    assert made.edit([Expand(0)]).reused_leaves == 0


@pytest.mark.parametrize("chunk_leaves", [1, 4])
def test_a_committed_speculation_is_the_straight_decode(chunk_leaves: int) -> None:
    straight = editable(tokens=TOKENS[:10], chunk_leaves=chunk_leaves)
    forked = editable(tokens=TOKENS[:10], chunk_leaves=chunk_leaves)
    forked.fork()
    for made in (straight, forked):
        made.append(TOKENS[10:13])
        made.edit([Collapse(6)])
        made.append(TOKENS[13:])
    forked.commit()
    assert forked.cache.digest() == straight.cache.digest()
    assert torch.equal(forked.last_leaf, straight.last_leaf)


def test_a_discarded_speculation_leaves_no_trace() -> None:
    made = editable(tokens=TOKENS, undo_bytes=1 << 20)
    before, last = made.cache.digest(), made.last_leaf
    made.fork()
    made.append([1, 2, 3])
    made.edit([Collapse(16, 2)])
    made.edit([Collapse(4), Replace(22, (0,))])
    made.edit([Expand(4)])
    assert made.cache.digest() != before
    made.discard()
    assert made.cache.digest() == before
    assert made.context.num_leaves == len(TOKENS)
    assert torch.equal(made.last_leaf, last)
    made.append([1])
    assert worst_difference(MODEL, STRICT, made) < 1e-10


def test_what_does_not_fit_is_refused_before_anything_is_touched() -> None:
    made = EditableContext(MODEL, small_cache(STRICT, max_leaves=9), chunk_leaves=4)
    made.append(TOKENS[:8])
    made.edit([Collapse(0)])
    before = made.cache.digest()
    with pytest.raises(CacheError, match="10 leaves do not fit 9; raise max_leaves, or collapse"):
        made.append([1, 2, 3])
    with pytest.raises(UserInputError, match="no gist leaf begins at time 4"):
        made.edit([Expand(0), Expand(4)])
    assert made.cache.digest() == before
    assert made.context.num_leaves == 7


def test_beside_undo_the_prefix_always_stays_and_the_prediction_knows_what_is_held() -> None:
    made = editable(tokens=TOKENS, undo_bytes=1 << 20)
    early = made.edit([Replace(4, (0,))])
    assert early.predicted_gain == pytest.approx(24 / 20)
    assert (early.full_recompute, early.computed_leaves, early.reused_leaves) == (False, 20, 0)
    undone = made.edit([Replace(4, (TOKENS[4],))])
    assert undone.predicted_gain == pytest.approx(24 / 4)
    assert (undone.full_recompute, undone.computed_leaves, undone.reused_leaves) == (False, 4, 16)
    assert made.counters.full_recomputes == 0
    assert worst_difference(MODEL, STRICT, made) < 1e-10


@pytest.mark.parametrize("hierarchy", HIERARCHIES)
@pytest.mark.parametrize("bit_equal", [False, True])
def test_a_shorter_context_has_its_own_last_output(hierarchy: Hierarchy, bit_equal: bool) -> None:
    for num_leaves in (1, 15, 18):
        made = editable(
            hierarchy, tokens=TOKENS, chunk_leaves=hierarchy.group**2, bit_equal=bit_equal
        )
        made.load(WorkingContext.of(TOKENS[:num_leaves], group=hierarchy.group))
        assert worst_difference(MODEL, hierarchy, made) < 1e-10
        assert not bit_equal or made.cache.digest() == recomputed(made).cache.digest()
    made.load(WorkingContext.of((), group=hierarchy.group))
    with pytest.raises(CacheError, match="the context is empty"):
        made.last_leaf  # noqa: B018


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([11], "token: got 11, want 0 .. 10, the model's vocabulary"),
        ([-1], "token: got -1, want a number from 0 on"),
        ([1, 2**70], "token: got 1180591620717411303424, want a number from 0 on"),
    ],
)
def test_a_token_that_the_model_lacks_is_refused_before_anything_is_touched(
    tokens: list[int], message: str
) -> None:
    made = editable(tokens=TOKENS)
    before, context = made.cache.digest(), made.context
    with pytest.raises(UserInputError, match=message):
        made.edit([Replace(16, tuple(tokens))])
    with pytest.raises(UserInputError, match=message):
        made.append(tokens)
    assert made.cache.digest() == before
    assert made.context is context


def test_a_loaded_context_is_checked_for_tokens_that_the_model_lacks() -> None:
    made = editable(tokens=TOKENS)
    before, context = made.cache.digest(), made.context
    for token in (-1, 11):
        strange = WorkingContext.of(torch.tensor([*TOKENS, token]), group=2)
        with pytest.raises(UserInputError, match=f"token: got {token}, want 0 .. 10"):
            made.load(strange)
    assert made.cache.digest() == before
    assert made.context is context


def test_a_context_of_another_group_and_more_levels_than_the_models_are_refused() -> None:
    made = editable(tokens=TOKENS)
    before = made.cache.digest()
    with pytest.raises(UserInputError, match="group of the context: got 3, want 2"):
        made.load(WorkingContext.of(TOKENS, group=3))
    assert made.cache.digest() == before
    with pytest.raises(UserInputError, match="levels: got 4, want at most 3, the levels of the mo"):
        editable(Hierarchy(group=2, windows=(2, 3, 2, None)))


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


@pytest.mark.parametrize("hierarchy", [STRICT, HIERARCHIES[-1]])
@pytest.mark.parametrize("undo_bytes", [0, 1 << 20])
def test_when_the_model_raises_the_context_is_the_old_one_and_its_rows_come_back(
    hierarchy: Hierarchy, undo_bytes: int
) -> None:
    made = editable(hierarchy, tokens=TOKENS, undo_bytes=undo_bytes)
    before, context, last_leaf = made.cache.digest(), made.context, made.last_leaf
    with model_raises_in_the_second_chunk():
        made.edit([Replace(12, (0,))])
    assert made.context is context
    assert torch.equal(made.last_leaf, last_leaf)
    made.load(context)
    assert made.cache.digest() == before
    assert worst_difference(MODEL, hierarchy, made) < 1e-10


def test_undo_keeps_no_row_from_behind_the_end_of_the_cache() -> None:
    made = editable(tokens=TOKENS, undo_bytes=3 * block_bytes())
    with model_raises_in_the_second_chunk():
        made.edit([Replace(12, (0,))])
    assert made.cache.num_leaves == 12 < made.context.num_leaves
    made.load(WorkingContext.of(TOKENS[:12], group=2))
    assert made.append(TOKENS[12:]).reused_leaves == 4
    assert worst_difference(MODEL, STRICT, made) < 1e-10


def test_a_cleared_context_is_in_no_speculative_span() -> None:
    made = editable(tokens=TOKENS)
    made.fork()
    made.append([1])
    made.clear()
    for ending in (made.commit, made.discard):
        with pytest.raises(CacheError, match="fork first"):
            ending()
    assert made.context.num_leaves == made.cache.num_leaves == 0


def test_chunks_that_cut_a_near_causal_group_are_refused() -> None:
    near = HIERARCHIES[-1]
    with pytest.raises(UserInputError, match="chunk_leaves: got 6, want a multiple of 4"):
        EditableContext(MODEL, small_cache(near), chunk_leaves=6)
    with pytest.raises(CacheError, match="the context is empty; append tokens first"):
        editable().last_leaf  # noqa: B018


def test_calibration_finds_the_quadratic_share_of_what_the_clock_shows() -> None:
    made = editable(chunk_leaves=2)
    cost = CostModel(linear=1.0, quadratic=0.05)

    def clock() -> float:
        leaves = made.cache.num_leaves
        return cost.linear * leaves + cost.quadratic * leaves**2

    found = calibrate(made, TOKENS[:23], clock=clock)
    assert made.cost is found
    assert found.quadratic_share(23) == pytest.approx(cost.quadratic_share(23))
    assert made.context.tokens.tolist() == TOKENS[:23]
    assert worst_difference(MODEL, STRICT, made) < 1e-10


def test_calibration_with_less_than_two_chunks_changes_nothing() -> None:
    made = editable()
    with pytest.raises(UserInputError, match="leaves to calibrate with: got 7, want at least 8"):
        calibrate(made, TOKENS[:7])
    assert made.context.num_leaves == 0


def test_a_chunk_that_cannot_be_timed_leaves_no_speculative_span() -> None:
    made = editable(tokens=TOKENS)
    before = made.cache.digest()
    with pytest.raises(CacheError, match="truncate"):
        made.time_chunk(-4, lambda: 0.0)
    assert made.cache.digest() == before
    made.fork()


def test_a_chunk_is_timed_from_when_the_device_is_idle_until_its_result_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, events = editable(tokens=TOKENS), []
    read = torch.Tensor.item

    def item(tensor: torch.Tensor) -> object:
        events.append("wait")
        return read(tensor)

    def clock() -> float:
        events.append("clock")
        return 0.0

    monkeypatch.setattr(torch.Tensor, "item", item)
    hook = MODEL.register_forward_hook(lambda *_: events.append("launched"))
    made.time_chunk(8, clock)
    hook.remove()
    assert events == ["wait", "clock", "launched", "wait", "clock"]


def test_single_precision_differs_by_rounding_only() -> None:
    made = EditableContext(MODEL_FP32, small_cache(STRICT, dtype=torch.float32), chunk_leaves=4)
    made.append(TOKENS)
    made.edit([Collapse(18), Replace(7, (0,))])
    assert worst_difference(MODEL_FP32, STRICT, made) < 1e-5
