"""Kernels that take a block table read blocks in place, and agree with the dense reference."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.attention.reference import DenseReference
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.interface import KVCache
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.page_support import FLASH_2, FLASH_3, PageSupport
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import PagedStore
from tests.gpu.conftest import NEEDS_GPU
from tests.rounding import attention_bound

FORMAT = RowFormat.full(heads=4, head_dim=64, dtype=DType.BFLOAT16)
LAYERS = AttnLayerMap.all_of(2)
SPANS = ([300, 7, 0], [1, 5, 2], [1, 1, 1])


def paged(block_size: int, support: PageSupport, device: torch.device) -> PagedCache:
    store = PagedStore(
        FORMAT,
        layers=LAYERS,
        num_blocks=-(-400 // block_size) * 3,
        block_size=block_size,
        device=device,
        page_support=support,
        in_place_only=True,
    )
    return PagedCache(store, [store.start() for _ in range(3)])


def fill(cache: KVCache, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    for span in SPANS:
        cache.extend(span)
        for layer in (0, 1):
            k, v = (
                torch.randn(
                    3, max(span), 4, 64, generator=generator, device=device, dtype=torch.bfloat16
                )
                for _ in range(2)
            )
            cache.append(layer, k, v)
        cache.advance()


def decode(package: str, table: str, cache: PagedCache, q_BTHD: Tensor) -> Tensor:
    kernel: Any = import_module(package).flash_attn_with_kvcache
    pages = cache.pages(1)
    out: Tensor | tuple[Tensor, ...] = kernel(
        q_BTHD,
        *pages.planes,
        cache_seqlens=pages.cache_seqlens,
        causal=True,
        **{table: pages.block_table},
    )
    return out[0] if isinstance(out, tuple) else out


@NEEDS_GPU
@pytest.mark.parametrize(
    ("package", "table", "support", "block_size"),
    [
        ("flash_attn", "block_table", FLASH_2, 256),
        ("flash_attn_interface", "page_table", FLASH_3, 256),
        ("flash_attn_interface", "page_table", FLASH_3, 16),
    ],
)
def test_a_kernel_reads_blocks_in_place(
    package: str, table: str, support: PageSupport, block_size: int
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    gpu = torch.device("cuda")
    cache = paged(block_size, support, gpu)
    fill(cache, gpu)
    q = torch.randn(3, 1, 4, 64, device=gpu, dtype=torch.bfloat16)
    got = decode(package, table, cache, q)
    assert cache.counters.gathers == 0
    (k, v), real = cache.view(1), cache.positions(1) >= 0
    for index in range(3):
        rows, one = real[index].nonzero().flatten(), slice(index, index + 1)
        q1, k1, v1 = q[one], k[one, rows], v[one, rows]
        want = DenseReference().attend(q1.double(), k1.double(), v1.double(), None)
        assert ((got[one] - want).abs() / attention_bound(q1, k1, v1)).max() <= 1


def test_gathered_blocks_equal_contiguous_rows_on_the_device(device: torch.device) -> None:
    contiguous = ContiguousCache(FORMAT, layers=LAYERS, batch=3, max_tokens=400, device=device)
    cache = paged(16, FLASH_3, device)
    fill(contiguous, device)
    fill(cache, device)
    assert cache.digest() == contiguous.digest()
