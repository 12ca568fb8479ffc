"""Eight models cache beside each other, isolated, in the bytes that were planned."""

from dataclasses import replace

import pytest
import torch

from scope_contracts.errors import CacheError
from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.domains import CacheDomains, DomainCaches
from scope_rt.lm.cache.indexer import indexer_format
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.specs.domains import CacheDomain, SequenceCacheSpec
from scope_rt.lm.specs.state_format import StateFormat

CPU = torch.device("cpu")
LAYERS = AttnLayerMap(num_layers=8, attention_layers=(3, 7))
SPEC = SequenceCacheSpec(
    num_layers=8,
    attention_layers=2,
    row_format=RowFormat.latent(rank=16, rope_dim=8, dtype=DType.BFLOAT16),
    index_format=indexer_format(dim=8, dtype=DType.BFLOAT16),
    state_format=StateFormat.mamba2(
        num_heads=4, head_dim=4, state_size=4, num_groups=4, conv_kernel=4, dtype=DType.FLOAT32
    ),
)


def domain(number: int) -> CacheDomain:
    return CacheDomain(name=f"specialist {number}", spec=SPEC, batch=2, max_tokens=6)


def write(caches: DomainCaches, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for cache in (caches.rows, caches.index_keys):
        assert cache is not None
        cache.extend([1, 2])
        for layer in LAYERS.attention_layers:
            cache.append(
                layer,
                *(
                    torch.randn(2, 2, p.heads, p.dim, generator=generator).bfloat16()
                    for p in cache.format.planes
                ),
            )
        cache.advance()
    assert caches.states is not None
    caches.states.extend([1, 2])
    for layer in LAYERS.others:
        shapes = [part.shape for part in caches.states.format.parts]
        caches.states.update(layer, *(torch.randn(2, *s, generator=generator) for s in shapes))
    caches.states.advance()


def test_eight_domains_take_what_was_planned_and_a_ninth_is_refused() -> None:
    made = CacheDomains(8 * domain(0).num_bytes())
    for number in range(8):
        made.open(domain(number), layers=LAYERS, device=CPU)
    assert made.num_bytes == made.budget_bytes == 8 * domain(0).num_bytes()
    with pytest.raises(CacheError, match="9 cache domains need"):
        made.open(domain(8), layers=LAYERS, device=CPU)
    assert len(made.domains) == 8
    made.close("specialist 3")
    made.open(domain(8), layers=LAYERS, device=CPU)


def test_what_one_domain_does_no_other_sees() -> None:
    made = CacheDomains(8 * domain(0).num_bytes())
    caches = [made.open(domain(number), layers=LAYERS, device=CPU) for number in range(8)]
    for number, each in enumerate(caches):
        write(each, seed=number % 7)
    digests = [each.digest() for each in caches]
    assert len(set(digests)) == 7, "equal rows, equal digest: 0 and 7 were given the same"
    write(caches[2], seed=5)
    caches[5].reset()
    changed = [now.digest() != before for now, before in zip(caches, digests, strict=True)]
    assert changed == [False, False, True, False, False, True, False, False]


def test_sharded_heads_are_allocated_as_one_ranks_share() -> None:
    rows = RowFormat.full(heads=4, head_dim=8, dtype=DType.FLOAT32)
    each = replace(domain(0), spec=replace(SPEC, row_format=rows, index_format=None))
    sizes = [
        CacheDomains(10**6, tp_degree=tp).open(each, layers=LAYERS, device=CPU).rows.num_bytes
        for tp in (1, 2, 4)
    ]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 4]


def test_a_name_taken_an_unknown_name_and_another_models_layers_are_refused() -> None:
    made = CacheDomains(10**6)
    made.open(domain(0), layers=LAYERS, device=CPU)
    with pytest.raises(CacheError, match="two cache domains are called"):
        made.open(domain(0), layers=LAYERS, device=CPU)
    with pytest.raises(CacheError, match="open are: specialist 0"):
        made.close("specialist 1")
    with pytest.raises(CacheError, match="layer map of specialist 1"):
        made.open(domain(1), layers=AttnLayerMap.all_of(8), device=CPU)
