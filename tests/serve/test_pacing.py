"""A chunk is begun as late as it dares, and never further ahead than the lead allows."""

from itertools import pairwise

import pytest

from scope_runners.serve.pacing import Pace, PaceRules

RULES = PaceRules(lead_chunks=1.0, safety=1.5, slack_s=0.05)


def pace_that_took(seconds: float, *, max_outstanding: int = 1) -> Pace:
    """At time 10, after three chunks that took so long each."""
    pace = Pace(RULES, max_outstanding=max_outstanding)
    for number in range(3):
        pace.granted(number * 2.0)
        pace.arrived(number * 2.0 + seconds, num_outstanding=0)
    return pace


def test_the_first_chunk_is_begun_at_once() -> None:
    assert Pace(RULES, max_outstanding=1).grant_in_s(0.0, chunk_media_s=0.75) == 0.0


def test_a_chunk_is_begun_when_what_is_left_to_show_is_what_it_may_take() -> None:
    pace = pace_that_took(0.2)
    assert pace.expected_s == pytest.approx(0.35)
    assert pace.grant_in_s(0.75, chunk_media_s=0.75) == pytest.approx(0.4)
    assert pace.grant_in_s(0.35, chunk_media_s=0.75) == 0.0


def test_the_slowest_of_late_is_expected_and_older_ones_are_forgotten() -> None:
    pace = pace_that_took(0.2)
    pace.granted(20.0)
    pace.arrived(21.0, num_outstanding=0)
    assert pace.expected_s == pytest.approx(1.55)
    for number in range(8):
        pace.granted(30.0 + number)
        pace.arrived(30.1 + number, num_outstanding=0)
    assert pace.expected_s == pytest.approx(0.2)


def test_nothing_is_begun_while_more_than_the_lead_waits_to_be_shown() -> None:
    pace = pace_that_took(3.0)
    assert pace.grant_in_s(2.0, chunk_media_s=0.75) == pytest.approx(1.25)


def test_what_is_outstanding_counts_as_made_and_as_many_as_may_be_are() -> None:
    pace = pace_that_took(0.5, max_outstanding=2)
    pace.granted(10.0)
    assert pace.num_outstanding == 1
    assert pace.grant_in_s(0.3, chunk_media_s=0.75) == pytest.approx(0.25)
    pace.granted(10.3)
    assert pace.grant_in_s(0.0, chunk_media_s=0.75) is None


def test_a_pipeline_that_is_slower_than_its_media_is_kept_full() -> None:
    pace = pace_that_took(2.0, max_outstanding=2)
    pace.granted(10.0)
    assert pace.grant_in_s(0.0, chunk_media_s=0.75) == 0.0


def test_a_chunk_that_a_cut_dropped_is_outstanding_no_more() -> None:
    pace = pace_that_took(0.2, max_outstanding=2)
    pace.granted(10.0)
    pace.granted(10.1)
    pace.arrived(10.5, num_outstanding=0)
    assert pace.num_outstanding == 0
    assert pace.expected_s == pytest.approx(0.65), "timed from its own grant"


def test_a_chunk_costs_what_it_takes_beside_the_one_before() -> None:
    pace = Pace(RULES, max_outstanding=2)
    pace.granted(0.0)
    pace.granted(0.1)
    pace.arrived(1.0, num_outstanding=1)
    pace.arrived(1.9, num_outstanding=0)
    assert pace.chunk_s == pytest.approx(1.0)


@pytest.mark.parametrize("generation_s", [0.05, 0.3, 0.6])
def test_a_prompt_is_seen_within_a_chunk_and_what_one_may_take(generation_s: float) -> None:
    """A whole stream by an injected clock: chunks are granted by the pace, shown one after the
    other, and a prompt at any moment takes effect at the next one that is begun."""
    chunk_s, now_s, shown_until_s = 0.75, 0.0, 0.0
    pace = Pace(RULES, max_outstanding=1)
    begun: list[tuple[float, float]] = []  # when each was begun, and when its pictures begin
    for _ in range(40):
        wait_s = pace.grant_in_s(max(0.0, shown_until_s - now_s), chunk_media_s=chunk_s)
        assert wait_s is not None
        now_s += wait_s
        pace.granted(now_s)
        start_s = now_s
        now_s += generation_s
        pace.arrived(now_s, num_outstanding=0)
        first_s = max(shown_until_s, now_s)
        assert len(begun) < 2 or first_s == shown_until_s, "it stalled"
        begun.append((start_s, first_s))
        shown_until_s = first_s + chunk_s
    worst = max(later[1] - earlier[0] for earlier, later in pairwise(begun[9:]))
    expected_s = generation_s * RULES.safety + RULES.slack_s
    assert worst == pytest.approx(chunk_s + min(expected_s, chunk_s), abs=1e-9)
