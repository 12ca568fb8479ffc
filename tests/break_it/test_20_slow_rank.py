"""A rank that holds up all others is named, and a group without it goes on."""

from tests.break_it.broken import Broken, said


def test_a_rank_ten_times_slower_than_the_other_is_named_by_both(broken: Broken) -> None:
    result = broken("slow-rank")
    assert result.ends == ("SlowRankError",) * 2
    assert "rank 1 computes" in said(result, 0)
    assert result.num_chunks == 8
