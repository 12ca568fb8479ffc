"""What a person asks for is coalesced, never lost, and answered exactly once."""

import threading
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scope_contracts.errors import PreflightError, ScopeError
from scope_rt.control.inbox import (
    MOST_COMMANDS,
    Ack,
    Conditioning,
    ControlInbox,
    Directive,
    Receipt,
    ScheduledDirective,
    Taken,
)
from scope_rt.control.transition import Interpolation, TransitionSpec
from tests.control.taking import take

SOFT = TransitionSpec(num_chunks=4, method=Interpolation.SLERP, bias_floor=0.5)
EMBEDS = torch.zeros(1, 1, 1)


def prompt(text: str, transition: TransitionSpec | None = None) -> Directive:
    return Directive(conditioning=Conditioning(text, EMBEDS), transition=transition)


def text_of(directive: Directive) -> str | None:
    return None if directive.conditioning is None else directive.conditioning.prompt


def took_effect(chunk_index: int, *, cache_epoch: int = 0) -> Ack:
    return Ack(chunk_index=chunk_index, cache_epoch=cache_epoch, superseded=False)


def replaced(chunk_index: int, *, cache_epoch: int = 0) -> Ack:
    return Ack(chunk_index=chunk_index, cache_epoch=cache_epoch, superseded=True)


DIRECTIVES = st.builds(
    lambda text, soft, cut, drop, recompute: Directive(
        conditioning=None if text is None else Conditioning(text, EMBEDS),
        transition=SOFT if soft and text is not None else None,
        hard_cut=cut,
        drop_in_flight=drop,
        recompute=recompute,
    ),
    st.none() | st.sampled_from("abc"),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(DIRECTIVES, max_size=8))
def test_a_later_prompt_wins_with_its_transition_and_nothing_else_is_lost(
    asked: list[Directive],
) -> None:
    inbox = ControlInbox()
    for directive in asked:
        inbox.post(directive)
    whole = take(inbox, 0).directive
    prompts = [directive for directive in asked if directive.conditioning is not None]
    assert text_of(whole) == (text_of(prompts[-1]) if prompts else None)
    assert whole.transition == (prompts[-1].transition if prompts else None)
    assert whole.hard_cut == any(directive.hard_cut for directive in asked)
    assert whole.drop_in_flight == any(directive.drop_in_flight for directive in asked)
    assert whole.recompute == any(directive.recompute for directive in asked)


def test_a_prompt_at_once_replaces_a_soft_one_whole() -> None:
    taken = prompt("soft", SOFT).then(prompt("at once"))
    assert (text_of(taken), taken.transition) == ("at once", None)


def test_what_is_no_prompt_keeps_the_prompt_and_its_transition() -> None:
    taken = prompt("soft", SOFT).then(Directive(recompute=True))
    assert (text_of(taken), taken.transition, taken.recompute) == ("soft", SOFT, True)


def test_what_was_taken_is_not_taken_again() -> None:
    inbox = ControlInbox()
    inbox.post(prompt("a"))
    assert text_of(take(inbox, 0).directive) == "a"
    assert take(inbox, 1).directive == Directive()


def test_a_receipt_names_the_chunk_and_epoch_of_its_effect() -> None:
    inbox = ControlInbox()
    cut, text = inbox.post(Directive(hard_cut=True)), inbox.post(prompt("a"))
    take(inbox, 7).acknowledge(7, 2)
    assert cut.wait(0) == text.wait(0) == took_effect(7, cache_epoch=2)


def test_a_receipt_is_open_until_its_chunk_is_planned() -> None:
    inbox = ControlInbox()
    receipt = inbox.post(prompt("a"))
    assert receipt.wait(0) is None
    taken = take(inbox, 0)
    assert receipt.wait(0.001) is None, "answered before anything was planned"
    taken.acknowledge(0, 0)
    assert receipt.wait(0) == took_effect(0)


def test_only_prompts_before_the_last_one_are_superseded() -> None:
    inbox = ControlInbox()
    receipts = [
        inbox.post(asked)
        for asked in (prompt("a"), Directive(hard_cut=True), prompt("b"), Directive(recompute=True))
    ]
    take(inbox, 3).acknowledge(3, 1)
    assert [receipt.wait(0) for receipt in receipts] == [
        replaced(3, cache_epoch=1),
        took_effect(3, cache_epoch=1),
        took_effect(3, cache_epoch=1),
        took_effect(3, cache_epoch=1),
    ]


def test_of_biases_and_seeds_the_last_one_wins_and_the_others_are_told() -> None:
    inbox = ControlInbox()
    asked = [
        Directive(bias=0.5, command_ids=("a",)),
        Directive(seed=1, command_ids=("b",)),
        Directive(bias=0.25, command_ids=("c",)),
    ]
    receipts = [inbox.post(each) for each in asked]
    taken = take(inbox, 3)
    want = Directive(bias=0.25, seed=1, command_ids=("a", "b", "c"))
    assert taken.directive == want
    taken.acknowledge(3, 1)
    acks = [receipt.wait(0) for receipt in receipts]
    assert [ack is not None and ack.superseded for ack in acks] == [True, False, False]


def test_no_more_commands_wait_for_a_chunk_than_its_record_can_name() -> None:
    inbox = ControlInbox()
    for number in range(MOST_COMMANDS):
        inbox.post(Directive(hard_cut=True, command_ids=(str(number),)))
    with pytest.raises(ScopeError, match=f"{MOST_COMMANDS} commands wait for the next chunk"):
        inbox.post(Directive(hard_cut=True, command_ids=("more",)))
    assert len(take(inbox, 0).directive.command_ids) == MOST_COMMANDS
    inbox.post(Directive(hard_cut=True, command_ids=("more",)))


def test_a_prompt_that_took_effect_is_not_superseded_by_one_after_it() -> None:
    inbox = ControlInbox()
    early = inbox.post(prompt("a"))
    taken = take(inbox, 0)
    late = inbox.post(prompt("b"))  # between taking and planning
    taken.acknowledge(0, 0)
    take(inbox, 1).acknowledge(1, 0)
    assert (early.wait(0), late.wait(0)) == (took_effect(0), took_effect(1))


def test_a_plan_that_failed_is_told_to_whoever_asked_and_the_stream_goes_on() -> None:
    inbox = ControlInbox()
    refused = inbox.post(prompt("a"))
    error = PreflightError("conditioning_embeds: got 3 tokens, want 5")
    take(inbox, 4).refuse(error)
    with pytest.raises(ScopeError, match=r"did not take effect: .*want 5") as told:
        refused.wait(0)
    assert told.value.__cause__ is error
    later = inbox.post(prompt("b"))
    take(inbox, 4).acknowledge(4, 0)
    assert later.wait(0) == took_effect(4)


def test_the_first_answer_stands() -> None:
    inbox = ControlInbox()
    receipt = inbox.post(prompt("a"))
    taken = take(inbox, 0)
    taken.acknowledge(0, 0)
    taken.refuse(PreflightError("too late"))
    taken.acknowledge(1, 1)
    inbox.close()
    assert receipt.wait(0) == took_effect(0)


def test_a_take_without_an_answer_is_refused_at_the_next_one() -> None:
    inbox = ControlInbox()
    receipt = inbox.post(prompt("a"))
    take(inbox, 0)
    take(inbox, 1).acknowledge(1, 0)
    with pytest.raises(ScopeError, match="its chunk was not planned"):
        receipt.wait(0)


def test_closing_answers_everyone_who_waits() -> None:
    inbox = ControlInbox()
    taken = inbox.post(prompt("a"))
    take(inbox, 0)
    pending = inbox.post(prompt("b"))
    told: list[str] = []

    def wait(receipt: Receipt) -> None:
        try:
            receipt.wait(60)
        except ScopeError as error:
            told.append(str(error))

    waiters = [threading.Thread(target=wait, args=(receipt,)) for receipt in (taken, pending) * 2]
    for waiter in waiters:
        waiter.start()
    inbox.close("rank 2 was lost")
    inbox.close("again")
    for waiter in waiters:
        waiter.join(30)
    assert told == ["control input did not take effect: rank 2 was lost"] * 4


def test_a_post_after_closing_is_refused_aloud() -> None:
    inbox = ControlInbox()
    inbox.close()
    with pytest.raises(ScopeError, match="the stream has ended; start a new stream"):
        inbox.post(prompt("a"))


def test_ten_thousand_posts_before_a_take_are_one_directive_and_all_are_answered() -> None:
    inbox, receipts, embeds = ControlInbox(), [], []
    for number in range(10_000):
        text = Conditioning(str(number), torch.zeros(1))
        embeds.append(weakref.ref(text.embeds))
        receipts.append(inbox.post(Directive(conditioning=text)))
    del text
    assert sum(each() is not None for each in embeds) == 1, "memory grows with the posts"
    taken = take(inbox, 0)
    taken.acknowledge(0, 0)
    assert text_of(taken.directive) == "9999"
    acks = [receipt.wait(0) for receipt in receipts]
    assert acks == [replaced(0)] * 9_999 + [took_effect(0)]


def test_a_scheduled_directive_waits_for_its_chunk() -> None:
    inbox = ControlInbox()
    inbox.schedule([ScheduledDirective(chunk_index=2, directive=Directive(hard_cut=True))])
    assert [take(inbox, index).directive.hard_cut for index in range(4)] == [
        False,
        False,
        True,
        False,
    ]


def test_a_post_wins_over_the_schedule_of_its_chunk() -> None:
    inbox = ControlInbox()
    inbox.schedule([ScheduledDirective(chunk_index=0, directive=prompt("planned", SOFT))])
    receipt = inbox.post(prompt("now"))
    taken = take(inbox, 0)
    taken.acknowledge(0, 0)
    assert (text_of(taken.directive), taken.directive.transition) == ("now", None)
    assert receipt.wait(0) == took_effect(0)


def test_the_schedule_to_come_can_be_saved_and_scheduled_again() -> None:
    asked = [
        ScheduledDirective(chunk_index=5, directive=Directive(recompute=True)),
        ScheduledDirective(chunk_index=2, directive=prompt("a", SOFT)),
        ScheduledDirective(chunk_index=0, directive=prompt("first")),
    ]
    inbox, restored = ControlInbox(), ControlInbox()
    inbox.schedule(asked)
    take(inbox, 0)
    assert inbox.scheduled() == (asked[1], asked[0])
    restored.schedule(inbox.scheduled())
    assert restored.scheduled() == inbox.scheduled()
    assert text_of(take(restored, 2).directive) == "a"


@dataclass
class Person:
    """Posts from a thread of its own, and remembers what for."""

    name: int
    posted: list[tuple[Directive, Receipt]] = field(default_factory=list)

    def post_all(self, inbox: ControlInbox, count: int) -> None:
        for number in range(count):
            asked = prompt(f"{self.name}.{number}") if number % 3 else Directive(hard_cut=True)
            self.posted.append((asked, inbox.post(asked)))


def test_many_people_at_once_lose_nothing_and_each_gets_one_true_answer() -> None:
    inbox, people = ControlInbox(), [Person(name) for name in range(8)]
    threads = [threading.Thread(target=person.post_all, args=(inbox, 300)) for person in people]
    chunks: list[Taken] = []

    def plan_chunk() -> None:
        chunks.append(take(inbox, len(chunks)))
        chunks[-1].acknowledge(len(chunks) - 1, 0)

    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        plan_chunk()
    plan_chunk()
    winners: dict[int, list[str | None]] = {index: [] for index in range(len(chunks))}
    for person in people:
        last = 0
        for asked, receipt in person.posted:
            ack = receipt.wait(0)
            assert ack is not None, "a receipt was never answered"
            assert ack.chunk_index >= last, "took effect before an earlier post"
            last = ack.chunk_index
            taken = chunks[ack.chunk_index].directive
            assert taken.hard_cut or not asked.hard_cut, "a cut was lost"
            if asked.conditioning is not None and not ack.superseded:
                winners[ack.chunk_index].append(text_of(asked))
    for index, won in winners.items():
        text = text_of(chunks[index].directive)
        assert won == ([] if text is None else [text]), "not one prompt per chunk took effect"
