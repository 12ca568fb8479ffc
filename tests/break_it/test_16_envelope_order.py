"""Envelopes are run once each, in the order of their calls."""

import pytest

from tests.break_it.broken import Broken, said


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("order/duplicated", "OrderError: call_id: got 3, want 4"),
        ("order/reordered", "OrderError: call_id: got 4, want 3"),
        ("order/replayed", "OrderError: call_id: got 2, want 3"),
    ],
)
def test_an_envelope_that_is_not_the_next_one_is_refused_by_the_leader(
    broken: Broken, name: str, sentence: str
) -> None:
    result = broken(name)
    assert said(result, 1).startswith(sentence)
    assert result.ends[0] == "PeerLostError"
