"""A rank's weights are, bit for bit and place for place, those of the checkpoint, and stay so."""

from math import prod
from sys import intern

from torch import Tensor, nn

from scope_contracts.weights import Checksums
from scope_rt.bit_digest import bit_digest
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.memory_digest import memory_digest
from scope_rt.models.shards import shard_of
from scope_rt.models.weight_files import Shard


def shard_digest(part: Tensor, shard: Shard) -> int:
    """The digest of `part` at its place; those of all shards add up to that of the whole."""
    place = shard.index * part.shape[shard.axis]
    if shard.axis == 0:
        return bit_digest(part, first_row=place)
    return bit_digest(part, first_column=place * prod(part.shape[2:]))


class Fingerprint:
    """A rank's weights as they were loaded: checksums for the checkpoint, digests for later.

    Weights are read where they are used, so that one that was replaced counts as changed too.
    """

    def __init__(self, model: nn.Module, group: Collectives | None = None) -> None:
        """`model` holds the slices of this rank of `group`; without one, whole weights."""
        group = group or SoloCollectives()
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for name, _ in model.named_parameters():
            owner, _, attribute = name.rpartition(".")
            self._places[name] = model.get_submodule(owner), intern(attribute)
        # First: what changes after this differs from one of the two.
        self.noted: Checksums = {name: self.now(name) for name in self._places}
        self.checksums: Checksums = {
            name: shard_digest(self._weight(name), shard_of(name, group)) for name in self._places
        }

    def now(self, name: str) -> int:
        """The digest of the weight `name` as the model has it in memory."""
        return memory_digest(self._weight(name))

    def num_bytes(self, name: str) -> int:
        """What `now` reads."""
        return self._weight(name).nbytes

    def _weight(self, name: str) -> Tensor:
        module, attribute = self._places[name]
        weight: Tensor = getattr(module, attribute)
        return weight
