"""Eight specialists share one pool: nobody sees another's rows, and all work is counted once."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from scope_rt.lm import decode_loop
from scope_rt.lm.decode_loop import DecodeLoop
from scope_rt.lm.requests import Request, Specialist
from tests.lm.specialists import SPECIALISTS, alone, answers, crowd, loop, request


def test_every_answer_is_what_the_model_says_alone() -> None:
    requests = crowd(20)
    done = answers(loop(), requests)
    assert {one.name: alone(one) for one in requests} == {
        name: answer.tokens for name, answer in done.items()
    }


def test_the_same_prompt_to_two_specialists_shares_nothing() -> None:
    of = loop()
    prompt = range(1, 30)
    first = answers(of, [request("a", "cpp", prompt=prompt)])
    other = answers(of, [request("b", "rust", prompt=prompt)])
    again = answers(of, [request("c", "cpp", prompt=prompt)])
    assert (first["a"].tokens_reused, other["b"].tokens_reused) == (0, 0)
    assert again["c"].tokens_reused == 28
    assert other["b"].tokens != first["a"].tokens
    assert again["c"].tokens == first["a"].tokens


@pytest.mark.parametrize("change", ["lora revision", "salt"])
def test_another_lora_revision_or_salt_shares_nothing(change: str) -> None:
    model = SPECIALISTS[0].model
    old, new = (Specialist("cpp", model, lora_revision=f"style@{n}") for n in (1, 2))
    of = loop(specialists=[old])
    answers(of, [request("a", prompt=range(1, 30), salt="one")])
    if change == "salt":
        done = answers(of, [request("b", prompt=range(1, 30), salt="two")])
    else:
        done = answers(DecodeLoop([new], of.store), [request("b", prompt=range(1, 30), salt="one")])
    assert done["b"].tokens_reused == 0
    same = answers(of, [request("c", prompt=range(1, 30), salt="one")])
    assert same["c"].tokens_reused == 28


def test_prefix_reuse_saves_the_prefill_it_claims() -> None:
    of, prefix = loop(), list(range(1, 34))  # 33 tokens: 8 whole blocks
    answers(of, [request("first", prompt=[*prefix, 40])])
    before = of.counters.tokens_prefilled
    assert before == 34
    tails = [[n, n, n] for n in range(10, 17)]
    done = answers(of, [request(str(n), prompt=prefix + tail) for n, tail in enumerate(tails)])
    assert all(answer.tokens_reused == 32 for answer in done.values())
    assert of.counters.tokens_reused == 7 * 32
    assert of.counters.tokens_prefilled - before == 7 * (36 - 32)
    assert of.store.counters.prefix_hits == 7 * 32
    assert of.store.pool.counters.hits == 7 * 8


def test_the_answer_is_found_too_when_the_conversation_goes_on() -> None:
    of = loop()
    first = request("a", prompt=range(1, 10), new=8)
    answer = answers(of, [first])["a"].tokens
    done = answers(of, [request("b", prompt=[*first.prompt, *answer, 3, 4])])
    assert done["b"].tokens_reused == 16  # of 9 + 8 tokens, the last of which was never fed


def test_in_every_step_each_running_request_advances_once() -> None:
    of = loop()
    lengths = {"a": 1, "b": 9, "c": 30}
    for name, length in lengths.items():
        of.submit(request(name, prompt=range(1, 1 + length), new=4))
    assert of.step() == of.step() == of.step() == []
    assert {done.request.name for done in of.step()} == set(lengths)


def test_a_long_prompt_is_computed_in_chunks_beside_the_tokens_of_others() -> None:
    chunked, whole = loop(prefill_chunk=8), loop()
    requests = [request("a", prompt=[3, 4], new=10), request("b", prompt=range(1, 40), new=2)]
    one, other = answers(chunked, requests), answers(whole, requests)
    assert {n: a.tokens for n, a in one.items()} == {n: a.tokens for n, a in other.items()}
    assert chunked.counters.tokens_prefilled == whole.counters.tokens_prefilled == 2 + 39
    assert whole.counters.forwards == 2 + 9  # both prompts, then a step for each token of a
    assert chunked.counters.forwards == 1 + 5 + 9  # 39 tokens are 5 chunks of up to 8


def test_a_stop_token_ends_the_answer() -> None:
    one = request("a", prompt=range(1, 10), new=20)
    expected = alone(one)
    stop = expected[6]
    done = answers(loop(), [request("a", prompt=one.prompt, new=20, stop_tokens=frozenset([stop]))])
    assert done["a"].tokens == expected[: expected.index(stop) + 1]


@pytest.mark.parametrize(("length", "chunk"), [(1, 512), (9, 8), (9, 512)])
def test_prompts_and_answers_are_counted_apart_however_they_are_fed(
    length: int, chunk: int
) -> None:
    of, asked = loop(prefill_chunk=chunk), request("a", prompt=range(1, 1 + length), new=3)
    answers(of, [asked])
    assert (of.counters.tokens_prefilled, of.counters.tokens_decoded) == (length, 2)
    answers(of, [asked])  # of 9 tokens two blocks are found, and one token is computed
    reused = of.counters.tokens_reused
    assert reused == (8 if length == 9 else 0)
    assert (of.counters.tokens_prefilled, of.counters.tokens_decoded) == (2 * length - reused, 4)


def test_a_forward_that_failed_counts_nothing_and_can_be_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    of, asked = loop(), request("a", prompt=range(1, 10))
    of.submit(asked)
    with monkeypatch.context() as patched:
        patched.setattr(decode_loop, "next_logits", fail)
        with pytest.raises(RuntimeError):
            of.step()
    assert (of.counters.forwards, of.counters.tokens_prefilled) == (0, 0)
    (done,) = of.run()
    assert done.tokens == alone(asked)
    assert of.counters.tokens_prefilled == 9


def test_integers_of_numpy_and_torch_are_answered_as_plain_ones_are() -> None:
    plain = request("plain", prompt=range(1, 10))
    stop = alone(plain)[2]
    prompts: dict[str, Any] = {
        "numpy": tuple(np.arange(1, 10, dtype=np.int64)),
        "array": np.arange(1, 10),
        "torch": tuple(torch.arange(1, 10)),
    }
    for name, prompt in prompts.items():
        stops: Any = frozenset([torch.tensor(stop)])
        of, one = loop(), Request(name=name, specialist="cpp", prompt=prompt, max_new_tokens=5)
        of.submit(one)
        of.submit(replace(one, name="stopped", stop_tokens=stops))
        done = {answer.request.name: answer.tokens for answer in of.run()}
        assert done == {name: alone(plain), "stopped": alone(plain)[:3]}
