"""A generator call that was not planned never starts, and a short count is never committed."""

from tests.break_it.broken import Broken, said


def test_a_call_too_many_on_rank_2_in_chunk_3_is_refused_on_entry(broken: Broken) -> None:
    result = broken("call-count/extra")
    assert said(result, 2).startswith("CallCountError: chunk 3: generator call 4, budget 3")
    assert result.ends[:2] == ("PeerLostError",) * 2


def test_a_call_too_few_on_rank_1_in_chunk_3_is_refused_at_commit(broken: Broken) -> None:
    result = broken("call-count/short")
    assert said(result, 1).startswith("CallCountError: chunk 3: generator calls: got 2, want 3")
    assert result.num_chunks <= 3


def test_a_real_step_too_many_on_rank_1_strands_nobody_in_a_collective(broken: Broken) -> None:
    result = broken("call-count/steps")
    assert said(result, 1).startswith("CallCountError: chunk 3: generator call 4, budget 3")
    assert result.ends[0] == "PeerLostError"
