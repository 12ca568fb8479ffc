"""What was asked for and is not what a chunk takes is told before the chunk is planned."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scope_contracts.errors import IntegrityError, ScopeError
from scope_rt.checks import Checks
from scope_rt.control.inbox import Conditioning, ControlInbox, Directive, ScheduledDirective, Taken
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.control.verified_inbox import VerifiedInbox
from scope_rt.instruments import Instruments
from tests.control.taking import take

SOFT = TransitionSpec(num_chunks=4, method=Interpolation.SLERP, bias_floor=0.5)
TEXT, OTHER = (Conditioning(name, torch.full((1, 1, 1), float(len(name)))) for name in ("a", "bb"))
CUT = Directive(hard_cut=True, drop_in_flight=True)

DIRECTIVES = st.builds(
    lambda text, soft, cut, recompute: Directive(
        conditioning=text,
        transition=SOFT if soft and text is not None else None,
        hard_cut=cut,
        drop_in_flight=cut,
        recompute=recompute,
    ),
    st.sampled_from([None, TEXT, OTHER]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
STEPS = st.lists(
    st.one_of(
        DIRECTIVES,
        st.lists(st.tuples(st.integers(0, 9), DIRECTIVES), max_size=3),
        st.sampled_from(["take", "must wait"]),
    ),
    max_size=20,
)


@given(STEPS)
def test_whatever_is_asked_for_in_any_order_is_taken(steps: list[Any]) -> None:
    inbox, chunk = VerifiedInbox(Instruments()), 0
    for step in steps:
        if isinstance(step, Directive):
            inbox.post(step)
        elif isinstance(step, list):
            inbox.schedule(ScheduledDirective(chunk_index=at, directive=one) for at, one in step)
        elif step == "must wait":
            assert inbox.take(chunk, unless=lambda directive: True) is None
        else:
            take(inbox, chunk)
            chunk += 1


def lost(taken: Taken) -> Taken:
    return replace(taken, directive=Directive())


def altered(**values: Any) -> Callable[[Taken], Taken]:
    return lambda taken: replace(taken, directive=replace(taken.directive, **values))


class Breaks:
    """Takes something else at chunk 3."""

    def __init__(self, change: Callable[[Taken], Taken]) -> None:
        self.change = change

    def reach(self, point: object, chunk: int, value: Any) -> Any:
        return self.change(value) if chunk == 3 else value


CHANGES = [
    (lost, Directive(conditioning=TEXT), "prompt None, asked for was a"),
    (lost, CUT, "hard_cut False, asked for was True"),
    (lost, Directive(recompute=True), "recompute False, asked for was True"),
    (altered(drop_in_flight=False), CUT, "drop_in_flight False, asked for was True"),
    (altered(conditioning=OTHER), Directive(conditioning=TEXT), "prompt bb, asked for was a"),
    (
        altered(conditioning=Conditioning("a", TEXT.embeds * 2)),
        Directive(conditioning=TEXT),
        "embeddings",
    ),
    (altered(transition=None), Directive(conditioning=TEXT, transition=SOFT), "transition None"),
    (altered(hard_cut=True), Directive(), "hard_cut True, asked for was False"),
]


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize(("change", "asked", "said"), CHANGES)
def test_what_is_not_what_was_asked_for_is_told_at_its_chunk(
    change: Callable[[Taken], Taken], asked: Directive, said: str, is_scheduled: bool
) -> None:
    for checks in (Checks(), replace(Checks(), planned=lambda *_, **__: None)):
        inbox = VerifiedInbox(Instruments(checks=checks, faults=Breaks(change)))
        take(inbox, 2)
        if is_scheduled:
            inbox.schedule([ScheduledDirective(chunk_index=3, directive=asked)])
        else:
            inbox.post(asked)
        if checks.planned is Checks().planned:
            with pytest.raises(IntegrityError, match=f"chunk 3: rank 0: plans {said}") as caught:
                take(inbox, 3)
            assert caught.value.suspect_from == 3
        else:
            take(inbox, 3)


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_transition_that_changes_while_it_waits_is_not_taken(is_scheduled: bool) -> None:
    inbox, spec = VerifiedInbox(Instruments()), replace(SOFT)
    asked = Directive(conditioning=TEXT, transition=spec)
    if is_scheduled:
        inbox.schedule([ScheduledDirective(chunk_index=3, directive=asked)])
    else:
        inbox.post(asked)
    object.__setattr__(spec, "bias_floor", 0.9)
    with pytest.raises(IntegrityError, match="chunk 3: rank 0: plans transition"):
        take(inbox, 3)


def test_who_posted_what_was_lost_is_answered() -> None:
    inbox = VerifiedInbox(Instruments(faults=Breaks(lost)))
    receipt = inbox.post(CUT)
    with pytest.raises(IntegrityError):
        take(inbox, 3)
    inbox.close("the stream failed")
    with pytest.raises(ScopeError, match="did not take effect"):
        receipt.wait(0)


def test_what_the_inbox_itself_loses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox, nothing = VerifiedInbox(Instruments()), take(ControlInbox(), 4)
    inbox.schedule([ScheduledDirective(chunk_index=4, directive=CUT)])
    monkeypatch.setattr(ControlInbox, "take", lambda self, index, unless: nothing)
    take(inbox, 3)
    with pytest.raises(IntegrityError, match="chunk 4: rank 0: plans hard_cut False"):
        take(inbox, 4)


def test_posts_of_many_threads_while_chunks_are_planned_are_no_false_alarm() -> None:
    inbox, stop = VerifiedInbox(Instruments()), threading.Event()

    def post() -> None:
        while not stop.is_set():
            inbox.post(Directive(conditioning=TEXT))
            inbox.post(CUT)

    threads = [threading.Thread(target=post) for _ in range(3)]
    for thread in threads:
        thread.start()
    for chunk in range(300):
        take(inbox, chunk)
    stop.set()
    for thread in threads:
        thread.join(10)
    inbox.close()
    take(inbox, 300)
