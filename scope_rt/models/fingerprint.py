"""A rank's weights are, bit for bit and place for place, those of the checkpoint."""

from math import prod
from sys import intern

from torch import Tensor, nn

from scope_contracts.weights import Checksums
from scope_rt.bit_digest import bit_digest
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.models.shards import shard_of
from scope_rt.models.weight_files import Shard


def shard_digest(part: Tensor, shard: Shard) -> int:
    """The digest of `part` at its place; those of all shards add up to that of the whole."""
    place = shard.index * part.shape[shard.axis]
    if shard.axis == 0:
        return bit_digest(part, first_row=place)
    return bit_digest(part, first_column=place * prod(part.shape[2:]))


class Fingerprint:
    """The checksums of a rank's weights as they were loaded."""

    def __init__(self, model: nn.Module, group: Collectives | None = None) -> None:
        """`model` holds the slices of this rank of `group`; without one, whole weights."""
        group = group or SoloCollectives()
        self._places: dict[str, tuple[nn.Module, str, Shard]] = {}
        for name, _ in model.named_parameters():
            owner, _, attribute = name.rpartition(".")
            place = model.get_submodule(owner), intern(attribute), shard_of(name, group)
            self._places[name] = place
        self.checksums: Checksums = {name: self.now(name) for name in self._places}

    def now(self, name: str) -> int:
        """The checksum of the weight `name` as the model has it in memory."""
        module, attribute, shard = self._places[name]
        return shard_digest(getattr(module, attribute), shard)

    def num_bytes(self, name: str) -> int:
        """What `now` reads."""
        module, attribute, _ = self._places[name]
        return int(getattr(module, attribute).nbytes)
