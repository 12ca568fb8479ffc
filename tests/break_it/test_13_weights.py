"""Weights are those of the checkpoint when a stream starts, and stay so."""

from tests.break_it.broken import Broken, said


def test_one_wrong_bit_in_rank_2s_shard_stops_all_ranks_before_the_first_chunk(
    broken: Broken,
) -> None:
    result = broken("weights/at-load")
    assert result.ends == ("FingerprintError",) * 3
    assert "blocks.0.attn1.to_q.weight" in said(result, 0)
    assert result.num_chunks == 0


def test_a_bit_of_rank_1s_weights_that_flips_in_memory_stops_it_before_chunk_3(
    broken: Broken,
) -> None:
    result = broken("weights/mid-stream")
    assert said(result, 1).startswith("FingerprintError: chunk 3: rank 1: weight blocks.0.attn1")
    assert (result.ends[0], result.num_chunks) == ("IntegrityError", 3)
