"""What comes out of order is refused, and a refusal changes nothing."""

from collections.abc import Callable

import pytest

from scope_contracts.errors import CacheError
from scope_rt.kv_cache.span import SpanState

State = SpanState[tuple[int, ...], str]


def state(*, span: bool = False, fork: bool = False) -> State:
    made: State = SpanState("no rows of this span; append them")
    if fork:
        made.fork(lambda: "before")
    if span:
        made.open((1, 2))
        made.written.add(0)
    return made


@pytest.mark.parametrize(
    ("made", "call", "says"),
    [
        (state(), lambda it: it.opened(), "no span is open; call extend first"),
        (state(), lambda it: it.commit(), "commit: no speculative span is open; fork first"),
        (state(), lambda it: it.discard(), "discard: no speculative span is open; fork first"),
        (state(span=True), lambda it: it.fork(pytest.fail), "fork: a span is open; advance first"),
        (state(span=True), lambda it: it.check_closed("keep"), "keep: a span is open; advance"),
        (state(span=True), lambda it: it.discard(), "discard: no speculative span is open"),
        (
            state(span=True),
            lambda it: it.check_written([0, 1, 2]),
            r"advance: layers \[1, 2\] got no rows of this span; append them",
        ),
        (state(fork=True), lambda it: it.fork(pytest.fail), "commit or discard it first"),
        (state(fork=True, span=True), lambda it: it.commit(), "commit: a span is open"),
    ],
)
def test_a_call_out_of_order_is_refused_and_changes_nothing(
    made: State, call: Callable[[State], object], says: str
) -> None:
    before = (made.span, set(made.written), made.marks)
    with pytest.raises(CacheError, match=says):
        call(made)
    assert (made.span, made.written, made.marks) == before


def test_a_span_that_is_opened_again_has_no_rows_yet() -> None:
    made = state(span=True)
    made.check_written([0])
    made.open((3, 4))
    assert (made.opened(), made.written) == ((3, 4), set())


@pytest.mark.parametrize("end", ["commit", "discard"])
def test_a_fork_ends_once_and_gives_back_what_it_kept(end: str) -> None:
    made = state(fork=True, span=end == "discard")
    assert getattr(made, end)() == "before"
    assert (made.span, made.written, made.marks) == (None, set(), None)
    made.fork(lambda: "again")
