"""A specialist with random weights that needs all three: latent rows, index keys and states.

Its caches may come from anywhere; a stack writes to the ones it is given and to no others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.domains import DomainCaches
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.state import StateCache
from scope_rt.lm.models.lightning_indexer import IndexerConfig, LightningIndexer
from scope_rt.lm.models.mamba2 import Mamba2, Mamba2Config
from scope_rt.lm.models.mla import MLA, MLAConfig
from scope_rt.lm.specs.domains import CacheDomain, SequenceCacheSpec

HIDDEN, LATENT_QUERY, ROPE = 256, 128, 16
MIXER = Mamba2Config(
    hidden_size=HIDDEN, num_heads=8, head_dim=64, state_size=64, n_groups=1, conv_kernel=4
)
LATENT = MLAConfig(
    hidden_size=HIDDEN,
    num_attention_heads=8,
    q_lora_rank=LATENT_QUERY,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=ROPE,
    v_head_dim=32,
)
LAYERS = AttnLayerMap(num_layers=4, attention_layers=(3,))


def indexer_config(top_k: int) -> IndexerConfig:
    return IndexerConfig(
        hidden_size=HIDDEN,
        q_lora_rank=LATENT_QUERY,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=top_k,
        qk_rope_head_dim=ROPE,
    )


SPEC = SequenceCacheSpec(
    num_layers=LAYERS.num_layers,
    attention_layers=LAYERS.num_slots,
    row_format=LATENT.row_format(DType.FLOAT32),
    index_format=indexer_config(1).row_format(DType.FLOAT32),
    state_format=MIXER.state_format(DType.FLOAT32),
)


def domain(name: str, max_tokens: int) -> CacheDomain:
    """One sequence of a specialist."""
    return CacheDomain(name=name, spec=SPEC, batch=1, max_tokens=max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRows:
    """What attention reads and writes: its rows, and index keys where there are some."""

    rows: ContiguousCache
    index_keys: ContiguousCache | None

    def caches(self) -> tuple[ContiguousCache, ...]:
        return (self.rows,) if self.index_keys is None else (self.rows, self.index_keys)


class SparseAttention(nn.Module):
    """Latent attention to the rows that an indexer chose, or to all where there are no keys."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.attention, self.indexer = MLA(LATENT), LightningIndexer(indexer_config(top_k))

    def forward(self, x_BTC: Tensor, *, cached: LatentRows, layer: int) -> Tensor:
        """Within an open span; batch 1."""
        start, mla = cached.rows.lengths[0], self.attention
        positions = torch.arange(start, start + x_BTC.shape[1])[None]
        chosen = None
        if cached.index_keys is not None:
            query_latent = mla.q_a_layernorm(mla.q_a_proj(x_BTC))
            chosen = self.indexer(
                x_BTC, query_latent, positions_BT=positions, cache=cached.index_keys, layer=layer
            )
        out: Tensor = mla(
            x_BTC, positions_BT=positions, cache=cached.rows, layer=layer, selected_BTS=chosen
        )
        return out


class Specialist(nn.Module):
    """`LAYERS`: three that keep a state and one that attends; the weights follow from `seed`."""

    def __init__(self, *, seed: int, top_k: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mixers = nn.ModuleList(Mamba2(MIXER) for _ in LAYERS.others)
        self.attend = SparseAttention(top_k)
        self.requires_grad_(False)

    def forward(self, x_BTC: Tensor, caches: DomainCaches) -> Tensor:
        """Move every cache of the domain by one span."""
        states, (layer,) = caches.states, LAYERS.attention_layers
        assert states is not None, "`SPEC` has states"
        cached = LatentRows(rows=caches.rows, index_keys=caches.index_keys)
        all_caches: tuple[StateCache | ContiguousCache, ...] = (states, *cached.caches())
        for cache in all_caches:
            cache.extend([x_BTC.shape[1]])
        for number, mixer in zip(LAYERS.others, self.mixers, strict=True):
            x_BTC = x_BTC + mixer(x_BTC, cache=states, layer=number)
        x_BTC = x_BTC + self.attend(x_BTC, cached=cached, layer=layer)
        for cache in all_caches:
            cache.advance()
        return x_BTC
