"""A chunk is pending until its consumer acknowledged it: none is lost, none is shown twice."""

from dataclasses import replace

import pytest
import torch

from scope_contracts.errors import UserInputError
from scope_rt.control.chunk import Arrived
from scope_rt.control.delivery import Delivery
from tests.tiny_models import envelope


def arrived(chunk: int) -> Arrived:
    return Arrived(
        envelope=replace(envelope(chunk)),
        prompt="p",
        latents=torch.zeros(1),
        latents_sha256="",
        generator_calls=1,
        stage_ms={},
    )


def pending(delivery: Delivery) -> list[int]:
    return [chunk.envelope.chunk_index for chunk in delivery.pending]


def delivered(num_chunks: int) -> Delivery:
    delivery = Delivery()
    for chunk in range(num_chunks):
        delivery.add(arrived(chunk))
    return delivery


def test_by_default_all_but_the_newest_chunk_are_acknowledged() -> None:
    delivery = delivered(3)
    delivery.drop_acknowledged()
    assert (pending(delivery), delivery.num_acknowledged) == ([2], 2)


@pytest.mark.parametrize(("says", "want"), [(0, [0, 1, 2]), (1, [1, 2]), (3, [2]), (9, [2])])
def test_what_the_consumer_acknowledges_is_no_longer_pending_and_the_newest_always_is(
    says: int, want: list[int]
) -> None:
    delivery = delivered(3)
    delivery.ask(None, lambda: says)
    delivery.drop_acknowledged()
    assert pending(delivery) == want


def test_a_consumer_that_takes_back_an_acknowledgement_gets_nothing_back() -> None:
    delivery, says = delivered(3), iter([2, 0])
    delivery.ask(None, lambda: next(says))
    delivery.drop_acknowledged()
    delivery.drop_acknowledged()
    assert pending(delivery) == [2]


def test_the_consumer_wants_no_more_than_it_asked_for() -> None:
    delivery = delivered(3)
    assert delivery.wants_more()
    delivery.ask(4, None)
    assert delivery.wants_more()
    assert not delivery.wants_more(1)
    delivery.add(arrived(3))
    assert not delivery.wants_more()


def test_a_new_stream_counts_anew() -> None:
    delivery = delivered(3)
    delivery.begin()
    assert (delivery.num_delivered, delivery.num_acknowledged, pending(delivery)) == (0, 0, [])


@pytest.mark.parametrize(("says", "want"), [(5, [5, 6, 7]), (6, [6, 7]), (8, [])])
def test_after_a_restart_the_consumer_misses_what_it_has_not_acknowledged(
    says: int, want: list[int]
) -> None:
    delivery = Delivery()
    delivery.resume(tuple(arrived(chunk) for chunk in (5, 6, 7)), num_acknowledged=5)
    assert delivery.num_delivered == 8
    delivery.ask(None, lambda: says)
    assert [chunk.envelope.chunk_index for chunk in delivery.missing()] == want


def test_after_a_restart_a_consumer_that_says_nothing_gets_all_that_is_pending() -> None:
    delivery = Delivery()
    delivery.resume((arrived(5), arrived(6)), num_acknowledged=5)
    delivery.ask(None, None)
    assert [chunk.envelope.chunk_index for chunk in delivery.missing()] == [5, 6]


def test_a_consumer_that_lost_what_it_had_acknowledged_is_refused() -> None:
    delivery = Delivery()
    delivery.resume((arrived(5),), num_acknowledged=5)
    delivery.ask(None, lambda: 4)
    with pytest.raises(UserInputError, match=r"holds 4 chunks, .* up to 5; start a new stream"):
        delivery.missing()


def test_a_consumer_that_has_more_than_the_stream_to_resume_gets_none_of_it_twice() -> None:
    """The log ended early, so no later resume point was saved; the stream itself went on."""
    delivery = Delivery()
    delivery.resume((arrived(5),), num_acknowledged=5)
    delivery.ask(None, lambda: 9)
    with pytest.raises(UserInputError, match=r"holds 9 chunks, .* known up to 6 only"):
        delivery.missing()
