"""The device decides the kernel; what does not serve is refused with its reason."""

import pytest

from scope_contracts.errors import CacheError
from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.backend_policy import (
    DENSE_SCORE_BYTES,
    DeviceTraits,
    Lane,
    check_dense_bound,
    choose_lane,
    why_not,
)

BOTH = frozenset({"flash_attn", "flash_attn_interface"})
ROWS = RowFormat.full(heads=8, head_dim=128, dtype=DType.BFLOAT16)
LATENT = RowFormat.latent(rank=512, rope_dim=64, dtype=DType.BFLOAT16)


def gpu(major: int, minor: int, packages: frozenset[str] = BOTH) -> DeviceTraits:
    return DeviceTraits(type="cuda", capability=(major, minor), packages=packages)


@pytest.mark.parametrize(
    ("traits", "lane"),
    [
        (gpu(9, 0), Lane.FLASH_3),
        (gpu(9, 0, frozenset({"flash_attn"})), Lane.FLASH_2),
        (gpu(9, 0, frozenset()), Lane.DENSE),
        (gpu(8, 0), Lane.FLASH_2),
        (gpu(8, 9), Lane.FLASH_2),
        (gpu(7, 5), Lane.DENSE),
        (gpu(12, 1), Lane.DENSE),
        (DeviceTraits(type="cpu", packages=BOTH), Lane.DENSE),
    ],
    ids=["sm_90", "sm_90 FA2", "sm_90 bare", "sm_80", "sm_89", "sm_75", "sm_121", "cpu"],
)
def test_the_lane_of_a_device(traits: DeviceTraits, lane: Lane) -> None:
    choice = choose_lane(traits, ROWS)
    assert choice.lane is lane
    assert len(choice.passed_over) == list(Lane).index(lane)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (RowFormat.full(heads=8, head_dim=128, dtype=DType.FLOAT32), "these are float32"),
        (RowFormat.full(heads=8, head_dim=512, dtype=DType.BFLOAT16), "these have 512"),
        (LATENT, "these rows are latents"),
    ],
    ids=["float32", "wide heads", "latent"],
)
def test_rows_that_no_flash_kernel_takes_go_to_the_dense_lane(rows: RowFormat, reason: str) -> None:
    choice = choose_lane(gpu(9, 0), rows)
    assert choice.lane is Lane.DENSE
    assert all(reason in sentence for sentence in choice.passed_over)


def test_why_a_lane_does_not_serve_is_said() -> None:
    assert "built for Hopper (sm_90), this is sm_89" in str(why_not(Lane.FLASH_3, gpu(8, 9), ROWS))
    reason = why_not(Lane.FLASH_2, gpu(8, 0, frozenset()), ROWS)
    assert "package flash_attn, which is not installed" in str(reason)
    assert why_not(Lane.DENSE, gpu(9, 0), ROWS) is None


def test_pages_are_a_property_of_the_lane() -> None:
    assert Lane.FLASH_3.pages.reads(48)
    assert Lane.FLASH_2.pages.reads(256)
    assert not Lane.FLASH_2.pages.reads(128)
    assert not Lane.DENSE.pages.reads(256)
    assert why_not(Lane.DENSE, gpu(12, 1), ROWS) is None


def test_the_dense_lane_is_bounded_and_says_what_fits() -> None:
    check_dense_bound(batch=8, heads=24, queries=1, num_rows=8192)
    with pytest.raises(CacheError, match="give at most 170 queries at once"):
        check_dense_bound(batch=8, heads=24, queries=512, num_rows=8192)
    with pytest.raises(CacheError, match="shorten the cache"):
        check_dense_bound(batch=8, heads=24, queries=1, num_rows=DENSE_SCORE_BYTES)
