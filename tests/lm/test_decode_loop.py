"""Eight specialists share one pool: nobody sees another's rows, and everybody gets an answer."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_contracts.errors import CacheError, UserInputError
from scope_rt.kv_cache.block_key import BlockKey
from scope_rt.kv_cache.paged_store import PagedStore
from scope_rt.lm import decode_loop
from scope_rt.lm.decode_loop import DecodeLoop
from scope_rt.lm.requests import Completion, Request, Specialist
from tests.lm.eviction_models import tiny_lm
from tests.tiny_models import CPU

BLOCK = 4
NAMES = ("cpp", "python", "rust", "sql", "tests", "docs", "build", "review")
CHANGES: dict[str, Any] = {"num_hidden_layers": 1}


def specialist(name: str, seed: int, *, lora_revision: str = "", **changes: Any) -> Specialist:
    model = tiny_lm("llama", attention="sdpa", **CHANGES, **changes).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.4, generator=generator)
    return Specialist(name, model, lora_revision=lora_revision)


SPECIALISTS = [specialist(name, seed) for seed, name in enumerate(NAMES)]


def loop(
    *,
    num_blocks: int = 200,
    specialists: Iterable[Specialist] = SPECIALISTS,
    max_tokens: int | None = None,
    **sizes: int,
) -> DecodeLoop:
    specialists = list(specialists)
    rows = specialists[0].rows
    store = PagedStore(
        rows.row_format,
        layers=rows.layers,
        num_blocks=num_blocks,
        block_size=BLOCK,
        device=CPU,
        windows=rows.windows,
        max_tokens=max_tokens,
    )
    return DecodeLoop(specialists, store, **sizes)


def request(
    name: str, to: str = "cpp", *, prompt: Iterable[int], new: int = 5, **more: Any
) -> Request:
    return Request(name=name, specialist=to, prompt=tuple(prompt), max_new_tokens=new, **more)


def answers(of: DecodeLoop, requests: Iterable[Request]) -> dict[str, Completion]:
    for one in requests:
        of.submit(one)
    return {done.request.name: done for done in of.run()}


def alone(one: Request) -> tuple[int, ...]:
    """What a plain loop without any cache answers."""
    model = next(it.model for it in SPECIALISTS if it.name == one.specialist)
    tokens = list(one.prompt)
    with torch.no_grad():
        for _ in range(one.max_new_tokens):
            tokens.append(
                int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tuple(tokens[len(one.prompt) :])


def crowd(count: int) -> list[Request]:
    """Ragged requests to all specialists; those to one share the beginning of their prompts."""
    return [
        request(
            f"r{index}",
            NAMES[index % len(NAMES)],
            prompt=[*range(1, 11), *((5 * index + step) % 40 + 1 for step in range(1 + index % 7))],
            new=3 + index % 6,
        )
        for index in range(count)
    ]


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


def test_a_full_pool_makes_requests_wait_and_all_end_with_the_answers_of_a_large_one() -> None:
    requests = crowd(24)
    small = loop(num_blocks=14)
    done = answers(small, requests)
    assert len(done) == 24
    assert small.counters.preemptions > 0
    assert {name: answer.tokens for name, answer in done.items()} == {
        name: answer.tokens for name, answer in answers(loop(), requests).items()
    }
    assert small.store.pool.num_free == 14


def test_a_request_that_finds_no_room_holds_nothing_and_evicts_nothing_while_it_waits() -> None:
    of, prefix = loop(num_blocks=12), list(range(1, 18))  # 4 whole blocks and a token
    answers(of, [request("gone", prompt=prefix, new=1)])
    of.submit(request("large", "rust", prompt=range(1, 29), new=4))
    of.step()
    of.submit(request("waits", prompt=[*prefix, *range(1, 10)], new=1))  # 3 blocks on its 4
    before = (of.store.pool.counters.hits, of.store.pool.counters.evictions)
    of.step()
    assert of.num_unanswered == 2
    assert (of.store.pool.counters.hits, of.store.pool.counters.evictions) == before
    done = {answer.request.name: answer for answer in of.run()}
    assert done["waits"].tokens_reused == 16
    assert done["waits"].preemptions == 0


def test_a_request_that_has_just_ended_gives_its_blocks_and_is_not_preempted() -> None:
    older = request("older", "rust", prompt=range(1, 14), new=8)
    newer = request("newer", "cpp", prompt=range(1, 5), new=5)
    done = answers(loop(num_blocks=6), [older, newer])  # full when newer ends, in the same step
    assert done["newer"].tokens == alone(newer)
    assert done["older"].tokens == alone(older)
    assert done["newer"].preemptions == 0


def test_the_oldest_request_is_never_preempted_and_ends_first() -> None:
    of = loop(num_blocks=10)
    requests = [request(f"r{n}", NAMES[n % 8], prompt=range(1, 6 + n), new=12) for n in range(8)]
    done = answers(of, requests)
    assert of.counters.preemptions > 0
    assert done["r0"].preemptions == 0
    assert next(iter(done)) == "r0"


def test_equal_requests_end_in_the_order_in_which_they_came_preempted_or_not() -> None:
    of = loop(num_blocks=10)
    requests = [request(f"r{n}", NAMES[n % 8], prompt=range(n, n + 8), new=9) for n in range(8)]
    done = answers(of, requests)
    assert of.counters.preemptions > 0
    assert list(done) == [one.name for one in requests]


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


def test_a_request_that_can_never_fit_is_refused_with_what_to_change() -> None:
    of = loop(num_blocks=5)
    of.submit(request("fits", prompt=range(1, 17), new=5))
    with pytest.raises(UserInputError, match="needs 6 blocks for 21 tokens and the pool has 5"):
        of.submit(request("too long", prompt=range(1, 17), new=6))
    assert {done.request.name for done in of.run()} == {"fits"}


def test_a_request_that_a_step_would_refuse_is_refused_before_it_stops_the_others() -> None:
    short = loop(max_tokens=16)
    far = specialist("far", 0, max_position_embeddings=1 << 20)
    wide = loop(num_blocks=2_100, specialists=[far], prefill_chunk=8_200)
    for of, to, length, says in (
        (short, "cpp", 13, "feeds 17 tokens, max_tokens of the cache is 16; shorten it"),
        (loop(), "cpp", 253, "feeds 257 tokens, max_position_embeddings of cpp is 256"),
        (wide, "far", 8_196, "give at most 8184 queries at once .prefill_chunk 8200"),
    ):
        with pytest.raises(UserInputError, match=says):
            of.submit(request("large", to, prompt=[1] * length))
        of.submit(request("small", to, prompt=[1, 2, 3]))
        assert [done.request.name for done in of.run()] == ["small"]


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


def test_room_that_a_running_prompt_will_take_is_not_given_to_one_that_waits() -> None:
    of = loop(num_blocks=10, prefill_chunk=8)
    of.submit(request("first", "cpp", prompt=range(1, 33), new=1))  # 8 blocks in 4 steps
    of.step()
    of.submit(request("second", "rust", prompt=range(1, 29), new=1))  # 7 blocks, 8 are free
    assert [done.request.name for done in of.run()] == ["first", "second"]
    assert of.counters.preemptions == 0
    assert of.counters.tokens_prefilled == 32 + 28


def test_every_block_is_hashed_once_however_long_its_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, make = [], BlockKey.__init__

    def counted(key: BlockKey, *args: Any, **kwargs: Any) -> None:
        made.append(key)
        make(key, *args, **kwargs)

    monkeypatch.setattr(BlockKey, "__init__", counted)
    of = loop(num_blocks=12)
    requests = [request(f"r{n}", NAMES[n], prompt=range(1, 30), new=12) for n in range(3)]
    answers(of, requests)
    assert len(made) == 3 * (41 // BLOCK)  # the last of 29 + 12 tokens fills no block


def test_one_more_than_may_wait_is_refused_and_may_come_again() -> None:
    of = loop(max_waiting=1)
    of.submit(request("a", prompt=[1, 2]))
    with pytest.raises(CacheError, match="submit it again after a step"):
        of.submit(request("b", prompt=[1, 2]))
    of.step()
    of.submit(request("b", prompt=[1, 2]))
    assert len(of.run()) == 2


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (request("a", "cobol", prompt=[1]), "specialist: got 'cobol', want cpp, python"),
        (request("a", prompt=[]), "at least 1 of each"),
        (request("a", prompt=[1], new=0), "at least 1 of each"),
        (request("a", prompt=[1, 48]), "tokens from 1 to 48', want 0 to 47"),
        (request("a", prompt=[-1, 4]), "tokens from -1 to 4', want 0 to 47"),
    ],
)
def test_a_request_that_asks_for_nothing_known_is_refused(bad: Request, says: str) -> None:
    with pytest.raises(UserInputError, match=says):
        loop().submit(bad)


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


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"prompt": (1.5,) * 9}, "bad: .* are integers: .*; tokenize the text first"),
        ({"prompt": "a text too"}, "bad: .* are integers"),
        ({"prompt": None}, "bad: .* are integers"),
        ({"max_new_tokens": 1.5}, "bad: .* are integers"),
        ({"stop_tokens": frozenset([None])}, "bad: .* are integers"),
        ({"salt": object()}, "bad: salt: got .*, want a string"),
    ],
)
def test_what_no_step_could_take_is_refused_and_the_next_request_ends(
    bad: dict[str, Any], says: str
) -> None:
    of = loop()
    with pytest.raises(UserInputError, match=says):
        of.submit(replace(request("bad", prompt=range(1, 10)), **bad))
    of.submit(request("next", prompt=range(1, 10), salt="half a pair: \ud800"))
    assert [done.request.name for done in of.run()] == ["next"]


@pytest.mark.parametrize("size", ["max_running", "max_waiting", "prefill_chunk"])
def test_a_loop_that_could_never_move_is_refused(size: str) -> None:
    sizes: Any = {size: 0}
    with pytest.raises(UserInputError, match=f"{size}: got 0, want at least 1"):
        loop(**sizes)


def test_specialists_of_another_shape_or_of_one_name_are_refused() -> None:
    other = Specialist("other", tiny_lm("llama", attention="sdpa", num_hidden_layers=2).double())
    with pytest.raises(UserInputError, match="a pool of their own"):
        loop(specialists=[SPECIALISTS[0], other])
    with pytest.raises(UserInputError, match="two specialists are called cpp"):
        loop(specialists=[SPECIALISTS[0], SPECIALISTS[0]])


@settings(max_examples=5, deadline=None)
@given(st.integers(9, 40), st.integers(1, 12), st.integers(1, 9))
def test_any_pool_that_fits_the_largest_request_answers_all(
    num_blocks: int, max_running: int, prefill_chunk: int
) -> None:
    requests = crowd(8)
    of = loop(num_blocks=num_blocks, max_running=max_running, prefill_chunk=prefill_chunk)
    done = answers(of, requests)
    assert {name: answer.tokens for name, answer in done.items()} == EXPECTED
    assert of.store.pool.num_free == num_blocks


EXPECTED = {one.name: alone(one) for one in crowd(8)}
