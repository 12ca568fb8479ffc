"""The decode loop answers right where layers see a window, and reuses what is left of a prefix."""

from dataclasses import replace
from typing import Any

import pytest

from scope_rt.lm.requests import Request, Specialist
from tests.lm.eviction_models import tiny_lm
from tests.lm.paged_batch import BLOCK
from tests.lm.specialists import alone, answers, loop

WINDOW = 6
PREFIX = list(range(1, 23))  # 5 whole blocks, two windows long
REQUESTS = [
    Request(
        name=f"r{index}",
        specialist="cpp",
        prompt=(*PREFIX, *((5 * index + step) % 40 + 1 for step in range(1 + index))),
        max_new_tokens=4 + index,
    )
    for index in range(6)
]


def specialist(kind: str) -> Specialist:
    """All layers of the Qwen2 see a window, and the first of the Qwen3's two."""
    changes: dict[str, Any] = {"sliding_window": WINDOW, "use_sliding_window": True}
    if kind == "qwen3":
        changes |= {"layer_types": ["sliding_attention", "full_attention"]}
    else:
        changes |= {"layer_types": None, "max_window_layers": 0}
    return Specialist("cpp", tiny_lm(kind, attention="sdpa", **changes).double())


SPECIALISTS = {kind: specialist(kind) for kind in ("qwen2", "qwen3")}
EXPECTED = {
    kind: {request.name: alone(request, [it]) for request in REQUESTS}
    for kind, it in SPECIALISTS.items()
}


def test_the_models_have_the_windows_that_are_tested() -> None:
    assert SPECIALISTS["qwen2"].rows.windows == (WINDOW, WINDOW)
    assert SPECIALISTS["qwen3"].rows.windows == (WINDOW, None)


@pytest.mark.parametrize("kind", SPECIALISTS)
@pytest.mark.parametrize("prefill_chunk", [3, 512])
def test_every_answer_is_what_the_model_says_alone(kind: str, prefill_chunk: int) -> None:
    of = loop(specialists=[SPECIALISTS[kind]], prefill_chunk=prefill_chunk)
    assert {name: done.tokens for name, done in answers(of, REQUESTS).items()} == EXPECTED[kind]
    assert of.store.counters.rows_evicted > 0
    assert of.store.pool.num_free == 200


@pytest.mark.parametrize("kind", SPECIALISTS)
def test_a_prefix_whose_beginning_left_the_window_is_reused(kind: str) -> None:
    of = loop(specialists=[SPECIALISTS[kind]])
    answers(of, REQUESTS)
    again = answers(of, REQUESTS)
    assert {name: done.tokens for name, done in again.items()} == EXPECTED[kind]
    for request in REQUESTS:  # of the whole prompt, less its last token, all whole blocks
        whole = (len(request.prompt) - 1) // BLOCK * BLOCK
        assert again[request.name].tokens_reused == whole >= len(PREFIX) - BLOCK


def test_a_full_pool_preempts_and_the_answers_stay() -> None:
    qwen3 = SPECIALISTS["qwen3"]
    of = loop(specialists=[qwen3], num_blocks=20, prefill_chunk=8)
    requests = [replace(request, max_new_tokens=20) for request in REQUESTS[:3]]
    done = answers(of, requests)
    assert of.counters.preemptions > 0
    assert {request.name: alone(request, [qwen3]) for request in requests} == {
        name: answer.tokens for name, answer in done.items()
    }
    assert of.store.pool.num_free == 20


def test_layers_that_all_see_a_window_answer_in_a_pool_of_one_window() -> None:
    # ceil((6 - 1 + 8) / 4) + 1 blocks of 9 or more
    of = loop(specialists=[SPECIALISTS["qwen2"]], num_blocks=5, prefill_chunk=8)
    done = answers(of, REQUESTS)
    assert {name: answer.tokens for name, answer in done.items()} == EXPECTED["qwen2"]
