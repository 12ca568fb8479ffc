from scope_contracts.row_format import CodecKind
from scope_lab.kv_bench.h2o import CAPACITY, EVICTING, FULL, PIECE_TOKENS, measure_once


def test_the_bench_counts_the_rows_that_layers_really_hold() -> None:
    found = measure_once(200, 10)
    full = found[FULL]
    assert (full.num_rows, full.peak_bytes) == (210, 210 * full.row_bytes)
    for name, (policy, codec) in EVICTING.items():
        # Pieces of 64 fill up to 128; the next 64 are attended to before any row leaves, in one of
        # the two layers at a time, where coded rows are decoded besides.
        of_both_layers = (2 * CAPACITY + PIECE_TOKENS) / 2 * found[name].row_bytes
        decoded = (CAPACITY + PIECE_TOKENS) * full.row_bytes / 2
        copied = 0 if codec is CodecKind.IDENTITY else decoded
        assert found[name].peak_bytes == of_both_layers + copied
        assert found[name].num_rows == policy.peak
    # int64 column, float32 score and a flag for every row, in two layers.
    assert found["h2o"].row_bytes == full.row_bytes + 2 * (8 + 4 + 1)
    # Four planes of two heads: 32 codes and a float16 scale in place of 32 float32.
    assert found["h2o, int8"].row_bytes == found["h2o"].row_bytes - 2 * 2 * 2 * (32 * 4 - 34)
