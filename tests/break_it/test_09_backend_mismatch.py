"""The attention backend is the same on all ranks, or the stream does not start."""

from tests.break_it.broken import Broken, said


def test_another_backend_on_rank_1_stops_both_ranks_before_the_first_chunk(broken: Broken) -> None:
    result = broken("backend-mismatch")
    assert said(result, 0).startswith("ParityError: kv_bias_backend (SCOPE_KV_BIAS_BACKEND)")
    assert (result.ends, result.num_chunks) == (("ParityError",) * 2, 0)
