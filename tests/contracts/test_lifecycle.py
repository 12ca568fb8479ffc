"""The lifecycle accepts exactly the legal orders, and an illegal step changes nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scope_contracts import (
    CacheState,
    CallCountError,
    EpochError,
    Lifecycle,
    LifecycleError,
    OrderError,
    PlanId,
    PPEnvelope,
    StartFrameError,
    StreamPosition,
    shutdown_envelope,
)

MakeEnvelope = Callable[..., PPEnvelope]
START = Lifecycle(plan_id=PlanId.PP0, frames_per_block=3)
CUT, STEADY, RECOMPUTE, PROMPT = "cut", "steady", "recompute", "prompt"


def legal_stream(make_envelope: MakeEnvelope, steps: Sequence[str]) -> list[PPEnvelope]:
    """A stream whose first chunk is a cut, followed by `steps`."""
    envelopes: list[PPEnvelope] = []
    epoch, start_frame = -1, 0
    for index, step in enumerate((CUT, *steps)):
        epoch, start_frame = (epoch + 1, 0) if step == CUT else (epoch, start_frame + 3)
        envelopes.append(
            make_envelope(
                {CUT: "first", RECOMPUTE: "recompute"}.get(step, "steady"),
                call_id=index,
                chunk_index=index,
                cache_epoch=epoch,
                current_start_frame=start_frame,
                reset_crossattn_cache=step in (CUT, PROMPT),
            )
        )
    return envelopes


def run(lifecycle: Lifecycle, envelopes: Sequence[PPEnvelope]) -> Lifecycle:
    for envelope in envelopes:
        lifecycle = lifecycle.enter(envelope).commit(envelope.expected_generator_calls)
    return lifecycle


steps = st.lists(st.sampled_from([CUT, STEADY, RECOMPUTE, PROMPT]), min_size=2, max_size=12)


@given(steps=steps)
def test_every_legal_stream_is_accepted(make_envelope: MakeEnvelope, steps: list[str]) -> None:
    envelopes = legal_stream(make_envelope, steps)
    end = run(START, envelopes)
    last = envelopes[-1]
    assert end.state is CacheState.ADVANCE
    assert (end.cache_epoch, end.chunk_index) == (last.cache_epoch, last.chunk_index)
    assert end.next_start_frame == last.current_start_frame + 3


@given(steps=steps, data=st.data())
def test_a_lost_repeated_or_moved_envelope_is_refused(
    make_envelope: MakeEnvelope, steps: list[str], data: st.DataObject
) -> None:
    envelopes = legal_stream(make_envelope, steps)
    at = data.draw(st.integers(0, len(envelopes) - 2))
    orders = {
        "lost": envelopes[:at] + envelopes[at + 1 :],
        "repeated": [*envelopes[: at + 1], *envelopes[at:]],
        "swapped": [*envelopes[:at], envelopes[at + 1], envelopes[at], *envelopes[at + 2 :]],
    }
    with pytest.raises(OrderError):
        run(START, orders[data.draw(st.sampled_from(sorted(orders)))])


ILLEGAL = {
    "call_id": st.integers(-3, 40),
    "cache_epoch": st.integers(-3, 40),
    "current_start_frame": st.integers(-3, 99),
    "init_cache": st.booleans(),
    "reset_kv_cache": st.booleans(),
    "plan_id": st.sampled_from(PlanId),
}


@given(steps=steps, data=st.data())
def test_one_wrong_field_anywhere_is_refused_and_changes_nothing(
    make_envelope: MakeEnvelope, steps: list[str], data: st.DataObject
) -> None:
    envelopes = legal_stream(make_envelope, steps)
    at = data.draw(st.integers(0, len(envelopes) - 1))
    name = data.draw(st.sampled_from(sorted(ILLEGAL)))
    right = getattr(envelopes[at], name)
    wrong = data.draw(ILLEGAL[name].filter(lambda value: value != right))
    before = run(START, envelopes[:at])
    kept = replace(before)
    with pytest.raises(LifecycleError):
        before.enter(replace(envelopes[at], **{name: wrong}))
    assert before == kept
    run(before, envelopes[at:])


@pytest.mark.parametrize(
    ("chunk", "changes", "error"),
    [
        ("first", {"init_cache": False}, EpochError),
        ("first", {"cache_epoch": 1}, EpochError),
        ("first", {"call_id": 1}, OrderError),
        ("first", {"plan_id": PlanId.PP1}, LifecycleError),
        ("first", {"reset_kv_cache": False}, EpochError),
        ("first", {"reset_crossattn_cache": False}, EpochError),
        ("first", {"do_kv_recompute": True}, EpochError),
        ("first", {"current_start_frame": 3}, StartFrameError),
        ("steady", {}, OrderError),
        ("steady", {"call_id": 0}, EpochError),
        (
            "steady",
            {"call_id": 0, "chunk_index": 0, "cache_epoch": -1, "current_start_frame": 0},
            EpochError,
        ),
    ],
)
def test_a_stream_can_only_begin_with_a_hard_cut(
    make_envelope: MakeEnvelope,
    chunk: str,
    changes: dict[str, Any],
    error: type[LifecycleError],
) -> None:
    with pytest.raises(error):
        START.enter(make_envelope(chunk, **changes))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"call_id": 0}, OrderError),
        ({"call_id": 2}, OrderError),
        ({"chunk_index": 0}, OrderError),
        ({"chunk_index": 2}, OrderError),
        ({"cache_epoch": 1}, EpochError),
        ({"cache_epoch": -1}, EpochError),
        ({"init_cache": True}, EpochError),
        ({"reset_kv_cache": True}, EpochError),
        ({"current_start_frame": 0}, StartFrameError),
        ({"current_start_frame": 6}, StartFrameError),
    ],
)
def test_within_an_epoch_everything_advances_by_one(
    make_envelope: MakeEnvelope, changes: dict[str, Any], error: type[LifecycleError]
) -> None:
    begun = run(START, [make_envelope()])
    begun.enter(make_envelope("steady"))
    with pytest.raises(error):
        begun.enter(make_envelope("steady", **changes))


def test_a_hard_cut_may_skip_chunk_indices_but_never_go_back(make_envelope: MakeEnvelope) -> None:
    begun = run(START, [make_envelope()])
    cut = make_envelope("first", call_id=1, cache_epoch=1, chunk_index=5)
    assert begun.enter(cut).chunk_index == 5
    with pytest.raises(OrderError, match="chunk_index: got 0, want at least 1"):
        begun.enter(replace(cut, chunk_index=0))


def test_a_prompt_change_may_reset_cross_attention_alone(make_envelope: MakeEnvelope) -> None:
    begun = run(START, [make_envelope()])
    assert begun.enter(make_envelope("steady", reset_crossattn_cache=True)).cache_epoch == 0


@pytest.mark.parametrize("observed", [0, 4, 6])
def test_commit_refuses_a_short_or_long_call_count(
    make_envelope: MakeEnvelope, observed: int
) -> None:
    opened = START.enter(make_envelope())
    with pytest.raises(CallCountError, match=f"chunk 0: .*got {observed}, want 5.*hang"):
        opened.commit(observed)


def test_commit_needs_an_open_chunk(make_envelope: MakeEnvelope) -> None:
    with pytest.raises(OrderError):
        START.commit(5)
    with pytest.raises(OrderError):
        run(START, [make_envelope()]).commit(5)


def test_enter_needs_the_last_chunk_committed(make_envelope: MakeEnvelope) -> None:
    opened = START.enter(make_envelope())
    with pytest.raises(OrderError, match="chunk 0 is open"):
        opened.enter(make_envelope("steady"))
    with pytest.raises(OrderError, match="chunk 0 is open"):
        opened.enter(shutdown_envelope(plan_id=PlanId.PP0, call_id=1))


def test_the_state_names_what_the_cache_goes_through(make_envelope: MakeEnvelope) -> None:
    assert START.state is CacheState.RESET
    opened = START.enter(make_envelope())
    assert opened.state is CacheState.RESET
    begun = opened.commit(5)
    assert begun.state is CacheState.ADVANCE
    assert begun.enter(make_envelope("steady")).state is CacheState.STEADY
    assert begun.enter(make_envelope("recompute")).state is CacheState.RECOMPUTE


def test_nothing_follows_a_shutdown(make_envelope: MakeEnvelope) -> None:
    stopped = START.enter(shutdown_envelope(plan_id=PlanId.PP0, call_id=0))
    with pytest.raises(OrderError, match="after shutdown"):
        stopped.enter(make_envelope(call_id=1))


def test_a_shutdown_keeps_the_order_of_calls() -> None:
    with pytest.raises(OrderError, match="call_id"):
        START.enter(shutdown_envelope(plan_id=PlanId.PP0, call_id=3))


def test_the_end_of_the_cache_counts_from_the_last_rebuild(make_envelope: MakeEnvelope) -> None:
    ends = [START.cache_end_frame]
    machine = START
    for envelope in legal_stream(make_envelope, [STEADY, STEADY, RECOMPUTE, STEADY, CUT]):
        machine = run(machine, [envelope])
        ends.append(machine.cache_end_frame)
    assert ends == [0, 3, 6, 9, 3 + 3, 9, 3]
    assert machine.next_start_frame == 3


def test_unchecked_following_gives_the_state_that_entering_gives(
    make_envelope: MakeEnvelope,
) -> None:
    machine = START
    for envelope in legal_stream(make_envelope, [STEADY, RECOMPUTE, PROMPT, CUT]):
        assert machine.follow(envelope) == machine.enter(envelope)
        machine = run(machine, [envelope])
    stop = shutdown_envelope(plan_id=PlanId.PP0, call_id=5)
    assert machine.follow(stop) == machine.enter(stop)


POSITION = StreamPosition(call_id=40, chunk_index=39, cache_epoch=2, next_start_frame=12)
RESUMED = Lifecycle.resumed(plan_id=PlanId.PP0, frames_per_block=3, position=POSITION)
NEXT = {"call_id": 41, "chunk_index": 40, "cache_epoch": 2, "current_start_frame": 12}


def test_a_new_stream_is_one_resumed_before_its_first_chunk() -> None:
    assert (
        Lifecycle.resumed(plan_id=PlanId.PP0, frames_per_block=3, position=StreamPosition())
        == START
    )


def test_a_resumed_stream_goes_on_where_it_was_once_its_cache_is_rebuilt(
    make_envelope: MakeEnvelope,
) -> None:
    begun = run(RESUMED, [make_envelope("rebuilt", **NEXT)])
    assert (begun.call_id, begun.chunk_index, begun.cache_epoch) == (41, 40, 2)
    assert (begun.next_start_frame, begun.cache_end_frame) == (15, 6)
    following = {"call_id": 42, "chunk_index": 41, "current_start_frame": 15}
    begun.enter(make_envelope("steady", cache_epoch=2, **following))


def test_a_resumed_stream_may_go_on_with_a_hard_cut(make_envelope: MakeEnvelope) -> None:
    begun = run(RESUMED, [make_envelope(call_id=41, chunk_index=40, cache_epoch=3)])
    assert (begun.next_start_frame, begun.cache_end_frame) == (3, 3)


@pytest.mark.parametrize(
    ("chunk", "changes", "field"),
    [
        ("steady", {}, "do_kv_recompute"),
        ("steady", {"reset_crossattn_cache": True}, "do_kv_recompute"),
        ("rebuilt", {"reset_crossattn_cache": False}, "reset_crossattn_cache"),
    ],
)
def test_ranks_that_hold_no_cache_want_past_and_text_before_they_go_on(
    make_envelope: MakeEnvelope, chunk: str, changes: dict[str, Any], field: str
) -> None:
    envelope = make_envelope(chunk, **NEXT | changes)
    with pytest.raises(LifecycleError, match=f"chunk 40: {field} on ranks that hold no cache"):
        RESUMED.enter(envelope)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"call_id": 40}, OrderError),
        ({"chunk_index": 39}, OrderError),
        ({"chunk_index": 41}, OrderError),
        ({"cache_epoch": 3}, EpochError),
        ({"current_start_frame": 9}, StartFrameError),
    ],
)
def test_a_resumed_stream_repeats_and_skips_nothing(
    make_envelope: MakeEnvelope, changes: dict[str, Any], error: type[LifecycleError]
) -> None:
    with pytest.raises(error):
        RESUMED.enter(make_envelope("rebuilt", **NEXT | changes))


def test_nothing_enters_before_the_rank_is_ready(make_envelope: MakeEnvelope) -> None:
    warming = START.warming_up()
    assert warming.state is CacheState.WARM_UP
    with pytest.raises(OrderError, match="before the rank is ready"):
        warming.enter(make_envelope())
    ready = warming.ready()
    assert ready == START
    assert ready.enter(make_envelope()).state is CacheState.RESET
    with pytest.raises(OrderError, match="ready: state: got 'reset', want warm_up"):
        ready.ready()
