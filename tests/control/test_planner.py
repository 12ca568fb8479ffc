"""Plans follow from the position and what was asked for, and nothing else."""

from dataclasses import replace

import pytest

from scope_contracts.envelope import PlanId
from scope_contracts.lifecycle import Lifecycle
from scope_rt.config import RECOMPUTE_NEVER
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


def test_after_a_restart_the_cache_is_rebuilt_once_and_the_text_sent_again() -> None:
    envelope, position = planner().next(hard_cut=False, new_text=True)
    envelope, position = replace(position, holds_cache=False).next(hard_cut=False, new_text=False)
    assert envelope.do_kv_recompute
    assert envelope.reset_crossattn_cache
    assert envelope.clean_pass
    assert envelope.expected_generator_calls == len(RECIPE.timesteps) + 2
    envelope, _ = position.next(hard_cut=False, new_text=False)
    assert not envelope.do_kv_recompute
    assert not envelope.reset_crossattn_cache


def test_a_cut_needs_no_lost_cache() -> None:
    _, position = planner().next(hard_cut=False, new_text=True)
    envelope, _ = replace(position, holds_cache=False).next(hard_cut=True, new_text=False)
    assert envelope.init_cache
    assert not envelope.do_kv_recompute


@pytest.mark.parametrize(
    ("every", "seen"),
    [(1, [0, 1, 1, 0, 1, 1]), (2, [0, 0, 1, 0, 0, 1]), (RECOMPUTE_NEVER, [0] * 6)],
)
def test_recompute_comes_every_so_many_chunks_of_an_epoch(every: int, seen: list[int]) -> None:
    position = planner()
    position = replace(position, settings=replace(position.settings, recompute_every=every))
    bits = []
    for index in range(6):
        envelope, position = position.next(hard_cut=index == 3, new_text=False)
        bits.append(int(envelope.do_kv_recompute))
    assert bits == seen


def test_the_bias_of_a_transition_is_the_plan_s_for_one_chunk() -> None:
    envelope, position = planner().next(hard_cut=False, new_text=True, bias=0.25)
    assert envelope.kv_cache_attention_bias == 0.25
    assert position.next(hard_cut=False, new_text=False)[0].kv_cache_attention_bias == 1.0
