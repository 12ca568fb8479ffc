"""What a model must be to compute leaves and summaries, and how its attention meets the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from scope_rt.lm.hierarchical.cache import HierarchicalCache
from scope_rt.lm.hierarchical.context import WorkingContext


class NodeAttention(Protocol):
    """`(layer, q, k, v) -> out`, each `[1, nodes, heads, head_dim]`."""

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor: ...


class NodeModel(Protocol):
    """A causal model over leaves and summaries: `scope_rt.lm.models.multilevel` is one."""

    @property
    def vocab_size(self) -> int:
        """Tokens are 0 .. vocab_size - 1."""
        ...

    @property
    def num_levels(self) -> int:
        """Levels that it can compute, the leaves' too."""
        ...

    def __call__(
        self, context: WorkingContext, nodes: Sequence[range], attend: NodeAttention
    ) -> Tensor:
        """Compute these nodes, level by level, and return them: `[nodes, channels]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedNodeAttention:
    """Writes a span's rows and attends to those that each of its nodes may see."""

    cache: HierarchicalCache
    hidden_keys: Tensor
    """0 where a node sees a key, else -inf: `[nodes, keys]`."""

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        self.cache.append(layer, k_BTHD, v_BTHD)
        k, v = self.cache.view(layer)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k, v))
        return F.scaled_dot_product_attention(q, k, v, self.hidden_keys).transpose(1, 2)
