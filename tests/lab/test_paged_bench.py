"""What the benchmark counts of paged caches adds up; how fast they were is not tested."""

from scope_lab.kv_bench.paged import (
    DECILES,
    Scale,
    measure_back_pressure,
    measure_decoding,
    measure_prefix_reuse,
    pool_cost_by_decile,
)

SCALE = Scale(context=72, steps=1, prefix=64, rounds=1, pool_operations=1_000)


def test_prefix_reuse_is_reported_as_the_tokens_that_were_computed() -> None:
    reuse = measure_prefix_reuse(SCALE)
    assert reuse.tokens_alone == 8 * (64 + 16)
    assert reuse.tokens_shared == (64 + 16) + 7 * 16
    assert reuse.tokens_saved == 1 - reuse.tokens_shared / reuse.tokens_alone


def test_eight_specialists_on_a_small_pool_answer_as_on_a_large_one() -> None:
    pressure = measure_back_pressure(num_requests=8, budget_bytes=180_000)
    assert pressure.preemptions > 0
    assert pressure.answers_equal == pressure.num_requests == 8


def test_only_one_sequence_on_adjacent_blocks_is_read_in_place() -> None:
    notes = {system.name: system.notes for system in measure_decoding(SCALE)}
    assert notes["paged in place, batch 1"] == notes["contiguous"] == ("0 views gathered",)
    assert notes["paged"] == ("4 views gathered",)  # 2 layers, prefill and one step


def test_the_pool_is_timed_in_tenths() -> None:
    assert len(pool_cost_by_decile(1_600, num_blocks=64)) == DECILES
