"""A rank's weights are, bit for bit and place for place, those of the checkpoint, and stay so."""

from math import prod

from torch import Tensor, nn

from scope_contracts.weights import Checksums
from scope_rt.bit_digest import bit_digest
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.models.shards import shard_of
from scope_rt.tensor_digests import TensorDigests, reader_of
from scope_rt.tensor_files.stored_tensor import Shard


def shard_digest(part: Tensor, shard: Shard) -> int:
    """The digest of `part` at its place; those of all shards add up to that of the whole."""
    place = shard.index * part.shape[shard.axis]
    if shard.axis == 0:
        return bit_digest(part, first_row=place)
    return bit_digest(part, first_column=place * prod(part.shape[2:]))


class Fingerprint:
    """A rank's weights as they were loaded: checksums for the checkpoint, digests for later."""

    def __init__(self, model: nn.Module, group: Collectives | None = None) -> None:
        """`model` holds the slices of this rank of `group`; without one, whole weights."""
        group = group or SoloCollectives()
        names = [name for name, _ in model.named_parameters()]
        # First: what changes after this differs from one of the two.
        self.digests = TensorDigests()
        for name in names:
            self.digests.note(name, reader_of(model, name))
        self.checksums: Checksums = {
            name: shard_digest(model.get_parameter(name), shard_of(name, group)) for name in names
        }
