import pytest

from scope_runners.timings import StageTimings


def test_percentiles_and_totals_are_per_stage() -> None:
    timings = StageTimings()
    for elapsed_ms in range(101):
        timings.add("denoise", float(elapsed_ms))
    timings.add("decode", 12.0)
    summary = timings.summary()
    assert list(summary) == ["denoise", "decode"]
    assert summary["denoise"].count == 101
    assert summary["denoise"].total_ms == 5050
    assert summary["denoise"].p50_ms == 50
    assert summary["denoise"].p95_ms == 95
    assert summary["decode"].p95_ms == 12


def test_a_long_stream_keeps_true_totals_and_recent_percentiles() -> None:
    timings = StageTimings()
    for elapsed_ms in [1.0] * 10_000 + [2.0] * 5_000:
        timings.add("denoise", elapsed_ms)
    summary = timings.summary()["denoise"]
    assert (summary.count, summary.total_ms, summary.p50_ms) == (15_000, 20_000, 2.0)
    assert len(timings._recent_ms["denoise"]) < 5_000


def test_a_block_that_raises_is_not_a_measurement() -> None:
    timings = StageTimings()
    with pytest.raises(KeyError), timings.measure("decode"):
        raise KeyError
    with timings.measure("encode"):
        pass
    assert list(timings.summary()) == ["encode"]
