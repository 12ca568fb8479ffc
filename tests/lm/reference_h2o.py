"""H2O written a second time, as plainly as possible: nothing leaves the cache, it is masked.

Not a test itself. It shares no code with the package: every decision is made here, on Python lists,
from the probabilities of a model that keeps its full `DynamicCache`.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(kw_only=True)
class ReferenceH2O:
    """Hooks for a model; `kept[layer][sequence][group]` are the columns that stay visible."""

    budget: int
    num_sink: int
    num_recent: int
    evict_every: int = 1
    num_groups: int = 1
    """1, or the number of K/V heads."""
    paddings: tuple[int, ...] = (0,)
    """Padding columns at the left of each sequence."""
    kept: dict[int, list[list[list[int]]]] = field(default_factory=dict)
    mass: dict[int, Any] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def install(self, model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(self._before, with_kwargs=True)
            layer.self_attn.register_forward_hook(self._after)

    def _before(self, attention: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask: Tensor = kwargs["attention_mask"]
        batch, _, num_new, num_columns = mask.shape
        index, heads = attention.layer_idx, attention.config.num_attention_heads
        groups = range(self.num_groups)
        self.kept.setdefault(index, [[[] for _ in groups] for _ in self.paddings])
        self.mass.setdefault(index, [[defaultdict(float) for _ in groups] for _ in self.paddings])
        narrowed = mask.expand(batch, heads, num_new, num_columns).clone()
        for b, padding in enumerate(self.paddings):
            for g in groups:
                new = range(max(num_columns - num_new, padding), num_columns)
                self.kept[index][b][g].extend(new)
                gone = sorted(set(range(padding, num_columns)) - set(self.kept[index][b][g]))
                size = heads // self.num_groups
                narrowed[b, g * size : (g + 1) * size, :, gone] = float("-inf")
        return args, kwargs | {"attention_mask": narrowed}

    def _after(self, attention: Any, args: Any, output: tuple[Tensor, Tensor]) -> None:
        index, weights = attention.layer_idx, output[1]
        _, heads, num_new, num_columns = weights.shape
        self.steps[index] = self.steps[index] + 1 if num_new == 1 else 0
        size = heads // self.num_groups
        for b, padding in enumerate(self.paddings):
            first_query = max(0, padding - (num_columns - num_new))
            for g in range(self.num_groups):
                paid = weights[b, g * size : (g + 1) * size, first_query:].sum(dim=(0, 1)).tolist()
                mass, columns = self.mass[index][b][g], self.kept[index][b][g]
                for column in columns:
                    mass[column] += paid[column]
                if self.steps[index] % self.evict_every == 0:
                    self.kept[index][b][g] = self._choose(columns, mass)

    def _choose(self, columns: list[int], mass: dict[int, float]) -> list[int]:
        if len(columns) <= self.num_sink + self.budget + self.num_recent:
            return columns
        end = len(columns) - self.num_recent
        middle = sorted(columns[self.num_sink : end], key=lambda column: (-mass[column], column))
        return sorted(columns[: self.num_sink] + middle[: self.budget] + columns[end:])
