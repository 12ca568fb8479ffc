"""A causal transformer whose tokens are the nodes of a tree over time: leaves and summaries.

A summary runs through the layers as a token of its own, so it has its own keys and values at every
layer. It enters as the pooled inputs of its children and attends to them; later leaves attend to it
in their place. The class computes; what a node sees is the caller's `attend`.

Positions are a node's centre and width in time. Its rotation is the mean of the rotations of all
times it covers, were they normal: `exp(i w t) exp(-(w sigma)^2 / 2)` (integrated positional
encoding, Barron et al. 2021; RoFormer, Su et al. 2021). A wide node blurs what it is too wide for.

Shape legend: N nodes, H heads, D head channels, C model channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scope_rt.lm.hierarchical.context import WorkingContext
from scope_rt.lm.hierarchical.node_model import NodeAttention
from scope_rt.models.rope import rotate


@dataclass(frozen=True, slots=True, kw_only=True)
class MultilevelConfig:
    """`num_levels` counts the leaves' level too."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    num_levels: int = 3
    rope_theta: float = 1_000_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class MultilevelBlock(nn.Module):
    """Pre-norm attention and SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: MultilevelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, (config.num_heads, config.head_dim)
        self.norm1, self.norm2 = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BNC: Tensor, rope: Tensor, attend: NodeAttention) -> Tensor:
        qkv = self.qkv(self.norm1(x_BNC)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, self.heads) for part in qkv)
        seen = attend(self.layer, rotate(q, rope), rotate(k, rope), v)
        x_BNC = x_BNC + self.out(seen.flatten(2))
        gate, up = self.gate_up(self.norm2(x_BNC)).chunk(2, dim=-1)
        out: Tensor = x_BNC + self.down(F.silu(gate) * up)
        return out


class MultilevelModel(nn.Module):
    """`model(context, nodes, attend)` computes nodes of a working context, level by level."""

    def __init__(self, config: MultilevelConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.num_levels = config.vocab_size, config.num_levels
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.level_embedding = nn.Embedding(config.num_levels, config.dim)
        self.pool = nn.Linear(config.dim, config.dim, bias=False)
        """What makes a gist of the mean of its children, in leaves and in summaries."""
        self.blocks = nn.ModuleList(
            MultilevelBlock(config, layer) for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.dim)

    def forward(
        self, context: WorkingContext, nodes: Sequence[range], attend: NodeAttention
    ) -> Tensor:
        """`nodes` name a run of every level; their outputs are `[N, C]`, in the same order."""
        x = torch.cat(self._inputs(context, nodes))[None]
        rope = self._rotations(context, nodes)
        for block in self.blocks:
            x = block(x, rope, attend)
        out: Tensor = self.norm(x[0])
        return out

    def _inputs(self, context: WorkingContext, nodes: Sequence[range]) -> list[Tensor]:
        """What enters the first layer, of every level.

        A summary pools leaves of earlier spans too.
        """
        first = min(run.start * context.group**level for level, run in enumerate(nodes) if run)
        x, begin = self._leaf_inputs(context, first, nodes[0].stop), first
        inputs = []
        for level, run in enumerate(nodes):
            inputs.append(
                x[run.start - begin : run.stop - begin] + self.level_embedding.weight[level]
            )
            begin //= context.group
            if level + 1 < len(nodes) and nodes[level + 1]:
                x = self._pooled(x[: len(x) // context.group * context.group], context.group)
        return inputs

    def _leaf_inputs(self, context: WorkingContext, first: int, end: int) -> Tensor:
        starts, levels = context.starts[first:end], context.levels[first:end]
        if not levels.any():
            return self._embedded(context, starts)
        weight = self.embedding.weight
        x = weight.new_empty((end - first, self.config.dim))
        for level in levels.unique().tolist():
            of_level = levels == level
            times = starts[of_level][:, None] + torch.arange(context.group**level)
            gists = self._embedded(context, times.flatten())
            for _ in range(level):
                gists = self._pooled(gists, context.group)
            x[of_level.to(x.device)] = gists
        return x

    def _embedded(self, context: WorkingContext, times: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(context.tokens[times].to(self.embedding.weight.device))
        return embedded

    def _pooled(self, x_NC: Tensor, group: int) -> Tensor:
        pooled: Tensor = self.pool(x_NC.unflatten(0, (-1, group)).mean(1))
        return pooled

    def _rotations(self, context: WorkingContext, nodes: Sequence[range]) -> Tensor:
        """Complex `[N, 1, D / 2]`: of length 1 for a token, shorter where a node is wide."""
        times = [
            context.times(run.start, run.stop, leaves_per_node=context.group**level)
            for level, run in enumerate(nodes)
        ]
        centers = torch.cat([center for center, _ in times])
        sigmas = torch.cat([sigma for _, sigma in times])
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64)
        speeds = self.config.rope_theta ** (-half / self.config.head_dim)
        lengths = torch.exp(-0.5 * (sigmas[:, None] * speeds) ** 2)
        rotations = torch.polar(lengths, centers[:, None] * speeds)[:, None]
        weight = self.embedding.weight
        double = weight.dtype is torch.float64
        return rotations.to(weight.device, torch.complex128 if double else torch.complex64)
