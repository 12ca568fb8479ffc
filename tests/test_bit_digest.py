"""A digest tells where every bit stands, and those of shards add up."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scope_rt import bit_digest as module
from scope_rt.bit_digest import MODULUS, bit_digest, row_digests
from scope_rt.memory_digest import memory_digest

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8]
DIGESTS = pytest.mark.parametrize("digest", [bit_digest, memory_digest])


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (drawn * 30).abs().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_digests_of_shards_add_up_to_that_of_the_whole(dtype: torch.dtype, axis: int) -> None:
    whole = numbers(dtype, 24, 32)
    shards = whole.chunk(4, dim=axis)
    place = "first_row" if axis == 0 else "first_column"
    width = whole.shape[axis] // 4
    parts = [bit_digest(shard, **{place: i * width}) for i, shard in enumerate(shards)]
    assert sum(parts) % MODULUS == bit_digest(whole)
    swapped = [bit_digest(shards[1 - i], **{place: i * width}) for i in range(2)]
    assert sum(swapped + parts[2:]) % MODULUS != bit_digest(whole), "two ranks' shards are swapped"


@DIGESTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_counts(dtype: torch.dtype, digest: Callable[[Tensor], int]) -> None:
    whole = numbers(dtype, 3, 5)
    want = digest(whole)
    raw = whole.view(torch.uint8)
    for byte in range(raw.shape[1]):
        for bit in range(8):
            raw[1, byte] ^= 1 << bit
            assert digest(whole) != want
            raw[1, byte] ^= 1 << bit
    assert digest(whole) == want


@DIGESTS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_that_keep_the_sum_count(
    dtype: torch.dtype, digest: Callable[[Tensor], int]
) -> None:
    whole = numbers(dtype, 6, 8)
    want = digest(whole)
    rows, columns = whole.clone(), whole.clone()
    rows[[1, 4]] = rows[[4, 1]]
    columns[:, [0, 7]] = columns[:, [7, 0]]
    signs = whole.clone().view(torch.uint8)
    signs[[2, 5], whole.element_size() - 1] ^= 0x80
    shuffled = whole.flatten()[torch.randperm(48, generator=torch.Generator().manual_seed(2))]
    for changed in (rows, columns, signs.view(dtype), shuffled.view(6, 8)):
        assert digest(changed) != want


def test_the_layout_in_memory_does_not_count() -> None:
    whole = numbers(torch.float32, 6, 8)
    assert bit_digest(whole.T.contiguous().T) == bit_digest(whole)
    assert bit_digest(torch.empty(0, 4)) == bit_digest(torch.empty(4, 0)) == 0
    assert bit_digest(torch.tensor(3.0)) == bit_digest(torch.tensor([3.0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_devices_compute_the_digests_of_the_cpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = numbers(dtype, 7, 6)
    monkeypatch.setattr(module, "_PIECE", 16)
    words = whole.view(module._WORDS[whole.element_size()])
    columns = weights_of(module._COLUMNS, words.shape[1])
    by_device = module.weighed(words, columns)
    assert [number % MODULUS for number in by_device.tolist()] == row_digests(whole).tolist()
    of_all = module.weighed(by_device, weights_of(module._ROWS, len(whole)))
    assert int(of_all) % MODULUS == bit_digest(whole)


def weights_of(sequence: int, count: int) -> Tensor:
    """As another device has them."""
    return module._copied(torch.device("cpu"), sequence, 0, count)
