"""A causal Wan-architecture video DiT, tensor-parallel by construction.

The class computes; it decides nothing and remembers nothing. What attends to what is the caller's
`SelfAttention`; positions, times and text come in ready-made, because they are constant over layers
and steps. One code path therefore serves cached streaming, training and the parity tests.

Shape legend: B batch, F latent frames, S tokens of a frame, T = F*S tokens, H this rank's heads,
D head channels, C model channels, L text tokens, G text groups (1, or one per chunk in training).
Parameter names are those of diffusers' `WanTransformer3DModel`; a rank holds the slices that
`shards.py` states. A layer costs five all-reduces: q/k norm, self-attention output, cross-attention
q norm, cross-attention output, feed-forward output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.precision import Linear, WideLayerNorm, WideLinear, wide
from scope_rt.models.rope import rotate


class SelfAttention(Protocol):
    """How a layer's queries meet keys: `(layer, q_BTHD, k_BTHD, v_BTHD) -> out_BTHD`."""

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Modulation:
    """Scales, shifts and gates of one noise level: constant over a chunk, so computed once.

    `layers` is `[num_layers, 6, B, F or 1, 1, C]`, `head` is `[2, B, F or 1, 1, C]`; float32 at
    least, whatever the model's dtype.
    """

    layers: Tensor
    head: Tensor


@dataclass(frozen=True, slots=True)
class TextKV:
    """Cross-attention keys and values of one layer, `[B * G, L, H, D]`."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestsAsRead:
    """Of the slices that were read from files, each at its place in the whole."""

    stored: Mapping[str, int]
    """In the files' own dtype, by file and weight."""
    used: Mapping[str, int]
    """In the dtype of use, by weight."""


class AllHeadsNorm(nn.Module):
    """RMS norm over all heads of all ranks; this rank holds its slice of the weight."""

    def __init__(self, local_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(local_dim))


def norm_over_heads(
    tensors: Sequence[Tensor],
    norms: Sequence[AllHeadsNorm],
    config: CausalWanConfig,
    group: Collectives,
) -> list[Tensor]:
    """Normalise several projections with one all-reduce of their sums of squares; rounded once, to
    the dtype that they came in."""
    squares = torch.stack([x.float().pow(2).sum(-1, keepdim=True) for x in tensors])
    scale = torch.rsqrt(group.all_reduce_sum(squares) / config.dim + config.eps)
    return [
        (wide(x) * s * wide(norm.weight)).to(x.dtype)
        for x, s, norm in zip(tensors, scale, norms, strict=True)
    ]


class Attention(nn.Module):
    """Projections of one attention: columns by head, output by row."""

    def __init__(self, config: CausalWanConfig, tp_degree: int) -> None:
        super().__init__()
        local = config.heads_of_rank(tp_degree) * config.attention_head_dim
        self.to_q = Linear(config.dim, local)
        self.to_k = Linear(config.dim, local)
        self.to_v = Linear(config.dim, local)
        self.to_out = nn.ModuleList([Linear(local, config.dim)])
        self.norm_q = AllHeadsNorm(local)
        self.norm_k = AllHeadsNorm(local)


def row_parallel(x: Tensor, linear: nn.Module, group: Collectives) -> Tensor:
    """Sum the partial products of all ranks; the bias is added once, after the sum."""
    assert isinstance(linear, nn.Linear)
    return group.all_reduce_sum(F.linear(x, linear.weight)) + linear.bias


class FeedForward(nn.Module):
    def __init__(self, config: CausalWanConfig, tp_degree: int) -> None:
        super().__init__()
        local = config.channels_of_rank(tp_degree)
        self.net = nn.ModuleList(
            [
                nn.ModuleDict({"proj": Linear(config.dim, local)}),
                nn.Identity(),
                Linear(local, config.dim),
            ]
        )

    def forward(self, x: Tensor, group: Collectives) -> Tensor:
        up, _, down = self.net
        assert isinstance(up, nn.ModuleDict)
        return row_parallel(F.gelu(up["proj"](x), approximate="tanh"), down, group)


def _modulation_table(num_rows: int, dim: int) -> nn.Parameter:
    table = torch.empty(1, num_rows, dim)
    if not table.is_meta:  # there, drawing would load all of torch's compiler
        table.normal_().div_(dim**0.5)
    return nn.Parameter(table)


class Block(nn.Module):
    def __init__(self, config: CausalWanConfig, layer: int, group: Collectives) -> None:
        super().__init__()
        self.config, self.layer, self.group = config, layer, group
        self.attn1 = Attention(config, group.size)
        self.attn2 = Attention(config, group.size)
        self.ffn = FeedForward(config, group.size)
        self.norm2 = WideLayerNorm(config.dim, config.eps)
        self.scale_shift_table = _modulation_table(6, config.dim)

    def forward(
        self, x_BFSC: Tensor, mod: Tensor, rope: Tensor, text: TextKV, attend: SelfAttention
    ) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = mod
        h = modulated(x_BFSC, shift1, scale1, self.config.eps)
        x_BFSC = gated(x_BFSC, self.self_attention(h, rope, attend), gate1)
        x_BFSC = x_BFSC + self.cross_attention(self.norm2(x_BFSC), text)
        h = modulated(x_BFSC, shift2, scale2, self.config.eps)
        return gated(x_BFSC, self.ffn(h, self.group), gate2)

    def self_attention(self, h_BFSC: Tensor, rope: Tensor, attend: SelfAttention) -> Tensor:
        a, x = self.attn1, h_BFSC.flatten(1, 2)
        q, k = norm_over_heads(
            (a.to_q(x), a.to_k(x)), (a.norm_q, a.norm_k), self.config, self.group
        )
        q, k, v = self.heads(q), self.heads(k), self.heads(a.to_v(x))
        out = attend(self.layer, rotate(q, rope), rotate(k, rope), v).flatten(2)
        return row_parallel(out, a.to_out[0], self.group).view_as(h_BFSC)

    def cross_attention(self, h_BFSC: Tensor, text: TextKV) -> Tensor:
        a, (batch, frames, _, _) = self.attn2, h_BFSC.shape
        groups = text.k.shape[0] // batch
        x = rearrange(h_BFSC, "b (g f) s c -> (b g) (f s) c", g=groups)
        (q,) = norm_over_heads((a.to_q(x),), (a.norm_q,), self.config, self.group)
        q, k, v = (y.transpose(1, 2) for y in (self.heads(q), text.k, text.v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out = row_parallel(out, a.to_out[0], self.group)
        return rearrange(out, "(b g) (f s) c -> b (g f) s c", g=groups, f=frames // groups)

    def text_kv(self, text_ELC: Tensor) -> TextKV:
        a = self.attn2
        (k,) = norm_over_heads((a.to_k(text_ELC),), (a.norm_k,), self.config, self.group)
        return TextKV(self.heads(k), self.heads(a.to_v(text_ELC)))

    def heads(self, x_BTC: Tensor) -> Tensor:
        """`[B, T, H * D]` as `[B, T, H, D]`."""
        return rearrange(x_BTC, "b t (h d) -> b t h d", d=self.config.attention_head_dim)


def modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`x`, normalised, scaled and shifted; rounded once."""
    normed = F.layer_norm(wide(x), x.shape[-1:], eps=eps)
    return (normed * (1 + scale) + shift).to(x.dtype)


def gated(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    """The residual with what a branch adds to it; rounded once."""
    return (wide(x) + wide(branch) * gate).to(x.dtype)


class TwoLayer(nn.Module):
    def __init__(self, in_dim: int, dim: int, *, kind: type[Linear] = Linear) -> None:
        super().__init__()
        self.linear_1 = kind(in_dim, dim)
        self.linear_2 = kind(dim, dim)


class ConditionEmbedder(nn.Module):
    def __init__(self, config: CausalWanConfig) -> None:
        super().__init__()
        self.time_embedder = TwoLayer(config.freq_dim, config.dim, kind=WideLinear)
        self.time_proj = WideLinear(config.dim, 6 * config.dim)
        self.text_embedder = TwoLayer(config.text_dim, config.dim)

    def time(self, sinusoid: Tensor) -> Tensor:
        e = self.time_embedder
        return e.linear_2(F.silu(e.linear_1(sinusoid)))  # type: ignore[no-any-return]

    def text(self, text: Tensor) -> Tensor:
        e = self.text_embedder
        return e.linear_2(F.gelu(e.linear_1(text), approximate="tanh"))  # type: ignore[no-any-return]


def time_sinusoid(timesteps: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Cosines then sines of `timesteps` (0..1000), as in DDPM and Wan: `[..., dim]`."""
    half = torch.arange(dim // 2, dtype=torch.float64, device=timesteps.device)
    angles = timesteps.double()[..., None] * 10_000.0 ** (-half / (dim // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


class CausalWanModel(nn.Module):
    """The DiT of one rank: `forward` predicts flow = noise - x0 for a chunk of latent frames."""

    def __init__(self, config: CausalWanConfig, group: Collectives | None = None) -> None:
        super().__init__()
        self.config = config
        self.group: Collectives = group or SoloCollectives()
        self.patch_embedding = nn.Conv3d(config.in_channels, config.dim, (1, 2, 2), (1, 2, 2))
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList(
            Block(config, layer, self.group) for layer in range(config.num_layers)
        )
        self.scale_shift_table = _modulation_table(2, config.dim)
        self.proj_out = Linear(config.dim, 4 * config.out_channels)
        self.as_read = DigestsAsRead(stored={}, used={})

    @property
    def dtype(self) -> torch.dtype:
        return self.proj_out.weight.dtype

    def modulation(self, timesteps_BF: Tensor) -> Modulation:
        """All layers' modulation for `timesteps_BF` in 0..1000; F may be 1 (all frames alike)."""
        embedder = self.condition_embedder
        dtype = torch.promote_types(self.dtype, torch.float32)
        e = embedder.time(time_sinusoid(timesteps_BF, self.config.freq_dim, dtype))
        e6 = rearrange(embedder.time_proj(F.silu(e)), "b f (n c) -> n b f 1 c", n=6)
        tables = torch.stack([block.scale_shift_table[0] for block in self.blocks])  # type: ignore[index]
        layers = rearrange(wide(tables), "l n c -> l n 1 1 1 c") + e6
        head = rearrange(wide(self.scale_shift_table[0]), "n c -> n 1 1 1 c") + e[:, :, None]
        return Modulation(layers, head)

    def text_kv(self, text_BGLE: Tensor) -> list[TextKV]:
        """Every layer's cross-attention K/V of text embeddings; one all-reduce a layer."""
        text = self.condition_embedder.text(text_BGLE.to(self.dtype).flatten(0, 1))
        return [block.text_kv(text) for block in self.blocks]  # type: ignore[operator]

    def forward(
        self,
        latents_BFCHW: Tensor,
        *,
        modulation: Modulation,
        rope: Tensor,
        text: Sequence[TextKV],
        attend: SelfAttention,
    ) -> Tensor:
        """Flow of the same shape as `latents_BFCHW` (`[B, F, channels, height/8, width/8]`)."""
        _, _, _, height, width = latents_BFCHW.shape
        patches = rearrange(
            latents_BFCHW.to(self.dtype), "b f c (h p) (w q) -> b f (h w) (c p q)", p=2, q=2
        )
        x = F.linear(patches, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        for block, mod, kv in zip(self.blocks, modulation.layers, text, strict=True):
            x = block(x, mod, rope, kv, attend)
        shift, scale = modulation.head
        x = self.proj_out(modulated(x, shift, scale, self.config.eps))
        flow: Tensor = rearrange(
            x, "b f (h w) (p q c) -> b f c (h p) (w q)", h=height // 2, w=width // 2, p=2, q=2
        )
        return flow
