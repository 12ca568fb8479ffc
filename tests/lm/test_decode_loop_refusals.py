"""A request that no step could serve is refused when it comes, and stops no other."""

from dataclasses import replace
from typing import Any

import pytest

from scope_contracts.errors import CacheError, UserInputError
from scope_rt.lm.requests import Request, Specialist
from tests.lm.eviction_models import tiny_lm
from tests.lm.specialists import SPECIALISTS, loop, request, specialist


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
