"""Which device a rank computes on follows from its place among the ranks of its host.

A generator rank has a GPU of its own: NCCL takes no two ranks of a group on one. A control rank,
which has no part in the model's sums, may share the GPU of its leader or compute on the CPU.
"""

from dataclasses import dataclass

import torch

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The ranks and GPUs of one host."""

    first_rank: int
    num_ranks: int
    num_gpus: int


def device_of(
    rank: int, topology: Topology, host: Host, *, control_device: str | None = None
) -> torch.device:
    """Where `rank`, which is one of this `host`, computes.

    Args:
        control_device: of the rank that only plans and decodes: `cpu`, `cuda` or `cuda:1`. None is
            a GPU of its own where there is one for each rank, else that of its leader.

    Raises:
        UserInputError: there are fewer GPUs than generator ranks here, or no such device.
    """
    if not host.num_gpus:
        return torch.device("cpu") if rank or control_device is None else _named(control_device, 0)
    has_control = topology.pipelined and host.first_rank == 0
    num_generators = host.num_ranks - has_control
    if num_generators > host.num_gpus:
        raise UserInputError(
            f"{num_generators} generator ranks of this host have {host.num_gpus} GPUs; give each "
            "one of its own, lower --tp, or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    owns_one = has_control and control_device is None and host.num_ranks <= host.num_gpus
    if has_control and rank == 0 and control_device is not None:
        return _named(control_device, host.num_gpus)
    place = rank - host.first_rank - (has_control and not owns_one)
    return torch.device("cuda", max(0, place))


def model_device_type() -> str:
    """Of the ranks that generate, which all ranks must know: of what backend and dtype follow."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _named(text: str, num_gpus: int) -> torch.device:
    name, _, index = text.partition(":")
    if text == "cpu":
        return torch.device("cpu")
    if name != "cuda" or (index and not index.isdecimal()) or int(index or 0) >= num_gpus:
        want = "cpu" + (f", or cuda:0 to cuda:{num_gpus - 1}" if num_gpus else "; no GPU is here")
        raise UserInputError(mismatch("control_device", got=text, want=want))
    return torch.device("cuda", int(index or 0))
