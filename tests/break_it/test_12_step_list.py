"""The denoising steps are the planned ones on every rank, or the chunk is not made."""

from tests.break_it.broken import Broken, said


def test_a_longer_step_list_on_rank_1_is_seen_by_both_ranks_before_chunk_3(
    broken: Broken,
) -> None:
    result = broken("steps-on-one-rank")
    assert said(result, 0).startswith("ParityError: chunk 3: num_denoise_steps: rank 0 has 2")
    assert (result.ends, result.num_chunks) == (("ParityError",) * 2, 3)
