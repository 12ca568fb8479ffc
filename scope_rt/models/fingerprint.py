"""A rank's weights are, bit for bit and place for place, those of the checkpoint, and stay so."""

from math import prod

import torch
from torch import Tensor, nn

from scope_contracts.weights import Checksums
from scope_rt.bit_digest import MODULUS, bit_digest
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.models.shards import shard_of
from scope_rt.tensor_digests import TensorDigests, reader_of
from scope_rt.tensor_files.stored_tensor import Shard

_PIECE_NUMBERS = 1 << 20


def shard_digest(part: Tensor, shard: Shard, dtype: torch.dtype | None = None) -> int:
    """The digest of `part` at its place; those of all shards add up to that of the whole.

    Of what it is in `dtype`, where that is given: a piece of it is cast at a time.
    """
    by_row = shard.axis == 0
    place = shard.index * part.shape[shard.axis] if part.dim() else 0
    first_column = 0 if by_row else place * prod(part.shape[2:])
    if dtype is None or dtype is part.dtype or part.dim() == 0:
        part = part if dtype is None else part.to(dtype)
        return bit_digest(part, first_row=place if by_row else 0, first_column=first_column)
    rows_at_a_time = max(1, _PIECE_NUMBERS * len(part) // max(1, part.numel()))
    digest, first_row = 0, place if by_row else 0
    for rows in part.split(rows_at_a_time):
        digest += bit_digest(rows.to(dtype), first_row=first_row, first_column=first_column)
        first_row += len(rows)
    return digest % MODULUS


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
