"""`kv_cache_attention_bias` is the planned one on every rank, or the chunk is not shown."""

from tests.break_it.broken import Broken, said


def test_another_bias_on_rank_1_is_seen_by_both_ranks_before_chunk_3(broken: Broken) -> None:
    result = broken("bias-on-one-rank")
    wanted = "ParityError: chunk 3: kv_cache_attention_bias: rank 0 has 1.0, rank 1 has 0.5"
    assert said(result, 0).startswith(wanted)
    assert result.num_chunks == 3


def test_another_bias_on_a_mesh_of_one_is_seen_by_rank0_in_its_answer(broken: Broken) -> None:
    result = broken("bias-on-the-mesh")
    assert said(result, 0).startswith("ParityError: chunk 3: the state digest")
    assert result.num_chunks == 3
