"""A cache is reset by all ranks at an epoch boundary, or the stream stops."""

from tests.break_it.broken import Broken, said


def test_a_cache_emptied_on_rank0_alone_is_seen_by_both_ranks_before_chunk_3(
    broken: Broken,
) -> None:
    result = broken("cache-reset/out-of-band")
    assert result.ends == ("ParityError",) * 2
    assert said(result, 1).startswith("ParityError: chunk 3: global_end_index: rank 0 has 0")
    assert result.num_chunks == 3


def test_a_reset_without_a_new_epoch_never_leaves_rank0(broken: Broken) -> None:
    result = broken("cache-reset/no-epoch")
    assert said(result, 0).startswith("EpochError: chunk 3: cache_epoch with init_cache True")
    assert (result.ends[1], result.num_chunks) == ("left", 3)
