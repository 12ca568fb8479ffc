from scope_runners.kv_bench.h2o import CAPACITY, EVICTING, FULL, PIECE_TOKENS, measure_once


def test_the_bench_counts_the_rows_that_layers_really_hold() -> None:
    found = measure_once(200, 10)
    full = found[FULL]
    assert (full.num_rows, full.peak_rows) == (210, 210)
    for name, (policy, _) in EVICTING.items():
        # Pieces of 64 fill up to 128; the next 64 are attended to before any row leaves.
        assert found[name].peak_rows == CAPACITY + PIECE_TOKENS
        assert found[name].num_rows == policy.peak
    # int64 column, float32 score and a flag for every row, in two layers.
    assert found["h2o"].row_bytes == full.row_bytes + 2 * (8 + 4 + 1)
    # Four planes of two heads: 32 codes and a float16 scale in place of 32 float32.
    assert found["h2o, int8"].row_bytes == found["h2o"].row_bytes - 2 * 2 * 2 * (32 * 4 - 34)
