"""Ranks that were started for different plans stop before the first model collective."""

from tests.break_it.broken import Broken, said


def test_another_plan_in_rank_2s_environment_stops_all_ranks_before_the_first_chunk(
    broken: Broken,
) -> None:
    result = broken("plan-mismatch/variable")
    assert result.ends == ("ParityError",) * 3
    assert said(result, 2).startswith("ParityError: plan_id (SCOPE_TP_PLAN): rank 0 has 'pp1'")
    assert result.num_chunks == 0


def test_another_plan_in_rank_1s_arguments_stops_all_ranks_before_the_first_chunk(
    broken: Broken,
) -> None:
    result = broken("plan-mismatch/arguments")
    assert result.ends == ("ParityError",) * 2
    assert result.num_chunks == 0
