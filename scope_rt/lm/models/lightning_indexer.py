"""DeepSeek's lightning indexer decides with small heads what the large ones read.

DeepSeek-V3.2-Exp (2025), section 2.1; parameter names are those of transformers'
`DeepseekV32Indexer`. Shapes as in `mla.py`, with J index heads of D channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.indexer import indexer_format, select_rows
from scope_rt.lm.cache.interface import KVCache
from scope_rt.models.rope import THETA, angles


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Sizes, named as in DeepSeek's `config.json`."""

    hidden_size: int
    q_lora_rank: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    qk_rope_head_dim: int
    rope_theta: float = THETA

    def row_format(self, dtype: DType) -> RowFormat:
        return indexer_format(dim=self.index_head_dim, dtype=dtype)


class LightningIndexer(nn.Module):
    """Writes the open span's index keys to a cache of their own and returns rows to attend to."""

    def __init__(self, config: IndexerConfig) -> None:
        super().__init__()
        self.config = c = config
        self.wq_b = nn.Linear(c.q_lora_rank, c.index_n_heads * c.index_head_dim, bias=False)
        self.wk = nn.Linear(c.hidden_size, c.index_head_dim, bias=False)
        self.k_norm = nn.LayerNorm(c.index_head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(c.hidden_size, c.index_n_heads, bias=False)

    def forward(
        self,
        x_BTC: Tensor,
        q_latent_BTQ: Tensor,
        *,
        positions_BT: Tensor,
        cache: KVCache,
        layer: int,
    ) -> Tensor:
        """Rows for every query, int64 `[B, T, min(index_topk, K)]`, -1 for none.

        `q_latent_BTQ` is the attention's own normalised query latent.
        """
        c = self.config
        q_BTJD = self.wq_b(q_latent_BTQ).unflatten(-1, (c.index_n_heads, c.index_head_dim))
        key_BT1D = self.k_norm(self.wk(x_BTC))[:, :, None]
        cache.append(layer, self._rotated(key_BT1D, positions_BT))
        (keys_BK1D,) = cache.view(layer)
        return select_rows(
            self._rotated(q_BTJD, positions_BT) * c.index_head_dim**-0.5,
            self.weights_proj(x_BTC) * c.index_n_heads**-0.5,
            keys_BK1D[:, :, 0],
            positions_BK=cache.positions(layer),
            query_positions_BT=positions_BT,
            top_k=c.index_topk,
        )

    def _rotated(self, x_BTJD: Tensor, positions_BT: Tensor) -> Tensor:
        """The first channels turned by position; channel i pairs with i + half here, not with its
        neighbour as in the attention itself.
        """
        dim = self.config.qk_rope_head_dim
        turns = angles(positions_BT[..., None], dim, self.config.rope_theta)
        cos, sin = turns.cos().to(x_BTJD.dtype), turns.sin().to(x_BTJD.dtype)
        first, second, rest = x_BTJD.split([dim // 2, dim // 2, x_BTJD.shape[-1] - dim], dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
