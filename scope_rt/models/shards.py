"""Which slice of every weight a rank holds: the tensor-parallel layout, in one table."""

from collections.abc import Mapping

from torch import Tensor

from scope_rt.collectives import Collectives
from scope_rt.tensor_files.stored_tensor import WHOLE, Shard

SHARD_AXIS = {
    "to_q.weight": 0,
    "to_q.bias": 0,
    "to_k.weight": 0,
    "to_k.bias": 0,
    "to_v.weight": 0,
    "to_v.bias": 0,
    "norm_q.weight": 0,
    "norm_k.weight": 0,
    "to_out.0.weight": 1,
    "ffn.net.0.proj.weight": 0,
    "ffn.net.0.proj.bias": 0,
    "ffn.net.2.weight": 1,
}
"""Axis that is split, by the end of the parameter's name; all other parameters are whole."""


def is_sharded(name: str) -> bool:
    """Whether each rank holds a part of the weight `name` only."""
    return name.endswith(tuple(SHARD_AXIS))


def shard_of(name: str, group: Collectives, *, head_dim: int = 1) -> Shard:
    """This rank's part of the weight `name`; whole where the weight is not sharded.

    Args:
        head_dim: of the model, whose heads are not cut; needed where they do not come out even.
    """
    for ending, axis in SHARD_AXIS.items():
        if name.endswith(ending):
            unit = 1 if ".ffn." in name else head_dim
            return Shard(axis=axis, index=group.rank, num_parts=group.size, unit=unit)
    return WHOLE


def shards_of(
    weights: Mapping[str, Tensor], group: Collectives, *, head_dim: int = 1
) -> dict[str, Tensor]:
    """This rank's parts of whole `weights`."""
    return {
        name: shard_of(name, group, head_dim=head_dim).of(weight).contiguous()
        for name, weight in weights.items()
    }
