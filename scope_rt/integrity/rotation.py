"""All that is held is verified within M chunks: each chunk its share of the bytes, in turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scope_contracts.weights import Checksums


class Digests(Protocol):
    """Tensors by name, and the digest each had when it was noted."""

    @property
    def checksums(self) -> Checksums: ...

    def now(self, name: str) -> int: ...

    def num_bytes(self, name: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Part:
    """What is verified in one go: tensors by name, or a layer of the cache."""

    digests: Digests | None
    name: str
    layer: int
    num_bytes: int


def parts_of(digests: Digests) -> list[Part]:
    """One for each tensor."""
    return [Part(digests, name, -1, digests.num_bytes(name)) for name in digests.checksums]


class Rotation:
    """Takes turns through parts; the order stays when more are added."""

    def __init__(self, within: int) -> None:
        """`within` is M, in chunks."""
        self.parts: Sequence[Part] = ()
        self._within, self._share, self._next = within, 0, 0

    def hold(self, parts: Sequence[Part]) -> None:
        """Take turns through these from now on."""
        self.parts = parts
        self._share = -(-sum(part.num_bytes for part in parts) // self._within)

    def due(self) -> list[Part]:
        """The next parts in turn: their share of all bytes, none twice."""
        due: list[Part] = []
        left, num_parts = self._share, len(self.parts)
        while left > 0 and len(due) < num_parts:
            part = self.parts[self._next % num_parts]
            self._next = (self._next + 1) % num_parts
            left -= part.num_bytes
            due.append(part)
        return due
