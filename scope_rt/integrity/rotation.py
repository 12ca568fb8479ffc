"""All that is held is verified within M chunks, an even share of the bytes in each turn."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scope_rt.tensor_digests import TensorDigests

_FEW_BYTES = 4 << 20
_MOST_BETWEEN = 8
"""Fewer bytes are not worth a turn in every chunk: where the CPU's caches are cold, a turn costs
some 0.2 ms more than its bytes. Small state has one every few chunks, 8 at most."""


@dataclass(frozen=True, slots=True)
class Part:
    """What is verified in one go: tensors by name, or a layer of the cache."""

    digests: TensorDigests | None
    name: str
    layer: int
    num_bytes: int = field(compare=False)


def parts_of(digests: TensorDigests) -> list[Part]:
    """One for each tensor."""
    return [Part(digests, name, -1, digests.num_bytes(name)) for name in digests.names]


class Rotation:
    """Takes turns through parts; each keeps its turn when more are added."""

    def __init__(self, within: int) -> None:
        """`within` is M, in chunks."""
        self.parts: Sequence[Part] = ()
        self._within, self._num_chunks = within, 0
        self._every = 1
        self._turns: list[list[Part]] = []

    def hold(self, parts: Sequence[Part]) -> None:
        """Take turns through these from now on; parts that were held before stay among them."""
        if not self._turns:
            share = sum(part.num_bytes for part in parts) // self._within + 1
            self._every = max(1, min(_MOST_BETWEEN, self._within // 4, _FEW_BYTES // share))
            self._turns = [[] for _ in range(self._within // self._every)]
        known = set(self.parts)
        loads = [sum(part.num_bytes for part in turn) for turn in self._turns]
        for part in parts:
            if part not in known:
                lightest = loads.index(min(loads))
                self._turns[lightest].append(part)
                loads[lightest] += part.num_bytes
        self.parts = parts

    def due(self) -> list[Part]:
        """What this chunk verifies, of all of them an even share; in most chunks none if they are
        small. Ask once a chunk."""
        self._num_chunks += 1
        turn, rest = divmod(self._num_chunks, self._every)
        return [] if rest else self._turns[turn % len(self._turns)]
