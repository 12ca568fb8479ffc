"""Only layers that attend own a slot of K/V; the others are never allocated for."""

from dataclasses import dataclass
from typing import Self

from scope_contracts.errors import CacheError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttnLayerMap:
    """Which layers of a hybrid stack have keys and values (the others keep a state, or nothing).

    Raises `CacheError` when a layer is named twice, out of order, or is not one of the model's.
    """

    num_layers: int
    attention_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        layers = self.attention_layers
        fits = all(0 <= layer < self.num_layers for layer in layers)
        if not layers or not fits or list(layers) != sorted(set(layers)):
            raise CacheError(
                f"attention layers {layers}: want at least one, ascending, each below the "
                f"model's {self.num_layers} layers"
            )

    @classmethod
    def all_of(cls, num_layers: int) -> Self:
        """A model in which every layer attends."""
        return cls(num_layers=num_layers, attention_layers=tuple(range(num_layers)))

    @property
    def num_slots(self) -> int:
        return len(self.attention_layers)

    @property
    def others(self) -> tuple[int, ...]:
        """Layers that do not attend."""
        attend = set(self.attention_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in attend)

    def slot(self, layer: int) -> int:
        """Cache slot of a layer of the model.

        Raises:
            CacheError: the layer does not attend, or does not exist.
        """
        try:
            return self.attention_layers.index(layer)
        except ValueError:
            have = ", ".join(map(str, self.attention_layers))
            raise CacheError(f"layer {layer} has no keys and values; layers {have} do") from None
