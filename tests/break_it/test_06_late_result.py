"""A result that is not the answer to the current question is never emitted."""

from tests.break_it.broken import Broken, said


def test_a_late_result_after_a_hard_cut_is_never_emitted(broken: Broken) -> None:
    result = broken("late-result")
    assert result.ends == ("left",) * 2
    assert result.num_chunks == 8


def test_the_answer_of_the_chunk_before_is_refused_by_rank0(broken: Broken) -> None:
    result = broken("stale-answer")
    assert said(result, 0).startswith("OrderError: result: got call, chunk, epoch (2, 2, 0)")
    assert result.num_chunks == 3
