"""Multi-head latent attention caches one latent a token for all heads, and decodes inside it.

DeepSeek-V2 (2024), section 2.1. Two forms of one function: *expanded* makes keys and values of
every head out of the cached latents and attends; *absorbed* moves the up-projections to the query
and to the output instead, so that a decode step reads `kv_lora_rank + qk_rope_head_dim` numbers a
token, whatever the number of heads. Parameter names are those of transformers'
`DeepseekV3Attention`.

Shape legend: B batch, T new tokens, K cached rows, H this rank's heads, R latent rank, N and P
head channels without and with a position, V value channels. Heads are shared by tensor-parallel
ranks and cost one all-reduce a layer; the latent is computed and cached whole on every rank.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

from scope_contracts.errors import UserInputError, mismatch
from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.lm.cache.backend_policy import check_dense_bound
from scope_rt.lm.cache.indexer import mask_of
from scope_rt.lm.cache.interface import KVCache
from scope_rt.models.rope import THETA, angles, rotate


class MLAForm(StrEnum):
    EXPANDED = "expanded"
    """Keys and values of every head exist for a moment: the cheaper form for long prompts."""
    ABSORBED = "absorbed"
    """They never do: the cheaper form for decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Sizes, named as in DeepSeek's `config.json`."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float = THETA
    rms_norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def row_format(self, dtype: DType) -> RowFormat:
        """What a token costs in one layer; the same on every rank."""
        return RowFormat.latent(rank=self.kv_lora_rank, rope_dim=self.qk_rope_head_dim, dtype=dtype)


class MLA(nn.Module):
    """One attention layer of this rank's heads.

    Raises `UserInputError` when the ranks cannot share the heads evenly.
    """

    def __init__(self, config: MLAConfig, group: Collectives | None = None) -> None:
        super().__init__()
        self.config, self.group = config, group or SoloCollectives()
        if config.num_attention_heads % self.group.size:
            want = f"a divisor of the model's {config.num_attention_heads} heads"
            raise UserInputError(mismatch("tp", got=self.group.size, want=want, fix="change --tp"))
        self.num_heads = config.num_attention_heads // self.group.size
        c, eps = config, config.rms_norm_eps
        per_head = c.qk_nope_head_dim + c.v_head_dim
        self.q_a_proj = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(c.q_lora_rank, self.num_heads * c.qk_head_dim, bias=False)
        latent_dim = c.kv_lora_rank + c.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, latent_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(c.kv_lora_rank, self.num_heads * per_head, bias=False)
        self.o_proj = nn.Linear(self.num_heads * c.v_head_dim, c.hidden_size, bias=False)

    def forward(
        self,
        x_BTC: Tensor,
        *,
        positions_BT: Tensor,
        cache: KVCache,
        layer: int,
        form: MLAForm = MLAForm.ABSORBED,
        selected_BTS: Tensor | None = None,
    ) -> Tensor:
        """Write the open span's latents to `cache` and attend to all rows it shows, causally.

        `selected_BTS` are the rows an indexer chose for each query, -1 for none; None means all.

        Raises `CacheError` where the scores would not fit the dense bound; nothing was written.
        """
        batch, num_new = x_BTC.shape[:2]
        most_rows = max(cache.lengths) + num_new
        check_dense_bound(batch=batch, heads=self.num_heads, queries=num_new, num_rows=most_rows)
        cache.append(layer, *self.latents(x_BTC, positions_BT))
        latent_BK1R, rope_key_BK1P = cache.view(layer)
        rows_BK = cache.positions(layer)
        seen_BTK = (rows_BK[:, None] >= 0) & (rows_BK[:, None] <= positions_BT[..., None])
        if selected_BTS is not None:
            seen_BTK &= mask_of(selected_BTS, rows_BK.shape[1])
        attend = self.absorbed if form is MLAForm.ABSORBED else self.expanded
        queries = self.queries(x_BTC, positions_BT)
        out_BTHV = attend(*queries, latent_BK1R[:, :, 0], rope_key_BK1P[:, :, 0], seen_BTK)
        out: Tensor = self.group.all_reduce_sum(self.o_proj(out_BTHV.flatten(2)))
        return out

    def latents(self, x_BTC: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """What is cached: the normalised latent and the rotated key, `[B, T, 1, R]`, `[.., P]`."""
        c = self.config
        both = self.kv_a_proj_with_mqa(x_BTC)[:, :, None]
        latent, rope_key = both.split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm(latent), rotate(rope_key, self._rotations(positions_BT))

    def queries(self, x_BTC: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Both parts of every query, `[B, T, H, N]` and `[B, T, H, P]`."""
        c = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTC)))
        q_BTHD = rearrange(q, "b t (h d) -> b t h d", h=self.num_heads)
        plain, turned = q_BTHD.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return plain, rotate(turned, self._rotations(positions_BT))

    def expanded(
        self, q_BTHN: Tensor, q_BTHP: Tensor, latent_BKR: Tensor, key_BKP: Tensor, seen_BTK: Tensor
    ) -> Tensor:
        """Attend to keys and values made of the latents: `[B, T, H, V]`."""
        up = rearrange(self.kv_b_proj(latent_BKR), "b k (h d) -> b k h d", h=self.num_heads)
        k_BKHN, v_BKHV = up.split([self.config.qk_nope_head_dim, self.config.v_head_dim], dim=-1)
        scores = einsum(q_BTHN, k_BKHN, "b t h n, b k h n -> b h t k")
        p_BHTK = self._softmax(scores, q_BTHP, key_BKP, seen_BTK)
        out: Tensor = einsum(p_BHTK, v_BKHV, "b h t k, b k h v -> b t h v")
        return out

    def absorbed(
        self, q_BTHN: Tensor, q_BTHP: Tensor, latent_BKR: Tensor, key_BKP: Tensor, seen_BTK: Tensor
    ) -> Tensor:
        """Attend to the latents themselves: `[B, T, H, V]`."""
        up = rearrange(self.kv_b_proj.weight, "(h d) r -> h d r", h=self.num_heads)
        up_k, up_v = up.split([self.config.qk_nope_head_dim, self.config.v_head_dim], dim=1)
        q_BTHR = einsum(q_BTHN, up_k, "b t h n, h n r -> b t h r")
        scores = einsum(q_BTHR, latent_BKR, "b t h r, b k r -> b h t k")
        p_BHTK = self._softmax(scores, q_BTHP, key_BKP, seen_BTK)
        out_BTHR = einsum(p_BHTK, latent_BKR, "b h t k, b k r -> b t h r")
        out: Tensor = einsum(out_BTHR, up_v, "b t h r, h v r -> b t h v")
        return out

    def _softmax(
        self, scores_BHTK: Tensor, q_BTHP: Tensor, key_BKP: Tensor, seen_BTK: Tensor
    ) -> Tensor:
        scores = scores_BHTK + einsum(q_BTHP, key_BKP, "b t h p, b k p -> b h t k")
        scores = scores.masked_fill(~seen_BTK[:, None], -torch.inf) / self.config.qk_head_dim**0.5
        p_BHTK = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        # A padding query of a ragged batch sees nothing, and softmax over nothing is no number.
        return p_BHTK.to(scores.dtype).masked_fill(~seen_BTK.any(-1)[:, None, :, None], 0)

    def _rotations(self, positions_BT: Tensor) -> Tensor:
        """Unit complex numbers `[B, T, 1, P / 2]`."""
        c = self.config
        turns = angles(positions_BT[..., None], c.qk_rope_head_dim, c.rope_theta)
        return torch.polar(torch.ones_like(turns), turns)
