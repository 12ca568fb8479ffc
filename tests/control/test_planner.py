"""Plans follow from the position and what was asked for, and nothing else."""

import torch

from scope_contracts.envelope import PlanId
from scope_contracts.lifecycle import Lifecycle
from scope_rt.control.inbox import Conditioning, ControlInbox, Directive, ScheduledDirective
from scope_rt.control.planner import Planner, StreamSettings
from tests.tiny_folder import RECIPE


def planner() -> Planner:
    return Planner(
        settings=StreamSettings(
            plan_id=PlanId.SINGLE, recipe=RECIPE, height=16, width=16, base_seed=1
        )
    )


def test_first_chunk_is_a_hard_cut_whatever_is_asked() -> None:
    envelope, _ = planner().next(hard_cut=False, new_text=False)
    assert envelope.init_cache
    assert envelope.reset_kv_cache
    assert envelope.reset_crossattn_cache
    assert (envelope.cache_epoch, envelope.current_start_frame, envelope.call_id) == (0, 0, 0)


def test_only_a_hard_cut_bumps_the_epoch() -> None:
    position = planner()
    seen = []
    for cut, text in [(False, False), (False, True), (True, False), (False, False)]:
        envelope, position = position.next(hard_cut=cut, new_text=text)
        seen.append(
            (envelope.cache_epoch, envelope.current_start_frame, envelope.reset_crossattn_cache)
        )
    assert seen == [(0, 0, True), (0, 3, True), (1, 0, True), (1, 3, False)]


def test_every_plan_is_legal_for_a_worker() -> None:
    position, lifecycle = planner(), Lifecycle(plan_id=PlanId.SINGLE, frames_per_block=3)
    for index in range(40):
        envelope, position = position.next(hard_cut=index % 7 == 3, new_text=index % 5 == 2)
        lifecycle = lifecycle.enter(envelope).commit(envelope.expected_generator_calls)
    assert lifecycle.cache_epoch == 6


def conditioning(prompt: str) -> Conditioning:
    return Conditioning(prompt, torch.zeros(1))


def test_of_two_prompts_the_later_wins_and_a_cut_is_never_lost() -> None:
    inbox = ControlInbox()
    inbox.post(Directive(conditioning=conditioning("a")))
    inbox.post(Directive(hard_cut=True))
    inbox.post(Directive(conditioning=conditioning("b")))
    taken = inbox.take(0)
    assert taken.conditioning is not None
    assert (taken.conditioning.prompt, taken.hard_cut) == ("b", True)
    assert inbox.take(1) == Directive()


def test_a_scheduled_directive_waits_for_its_chunk() -> None:
    inbox = ControlInbox()
    inbox.schedule([ScheduledDirective(chunk_index=2, directive=Directive(hard_cut=True))])
    assert [inbox.take(index).hard_cut for index in range(4)] == [False, False, True, False]
