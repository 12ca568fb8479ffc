"""The only door to `torch.distributed`: the groups of a plan, their sums, and raw transfers.

A lost peer or an expired wait leaves here as a `LinkError` that names what was waited for; nothing
is retried or swallowed. Messages travel over gloo on the CPU; sums of GPU tensors over NCCL.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from scope_contracts.errors import LinkError, LinkTimeoutError, PeerLostError
from scope_rt.config import RuntimeConfig
from scope_rt.mesh.topology import Topology


@contextmanager
def named_failures(what: str) -> Iterator[None]:
    """Turn a backend's RuntimeError into the link error that says what it means."""
    try:
        yield
    except RuntimeError as error:
        raise _link_error(what, str(error)) from error


def _link_error(what: str, text: str) -> LinkError:
    if "timed out" in text.lower() or "timeout" in text.lower():
        return LinkTimeoutError(f"{what}: no answer within the bound")
    first_line = re.sub(r"^\[[^]]*\]\s*", "", text.splitlines()[0])  # without gloo's source path
    return PeerLostError(f"{what}: a peer is gone ({first_line[:160]})")


class TorchCollectives:
    """`Collectives` over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        with named_failures("all_reduce in the generator group"):
            dist.all_reduce(tensor, group=self._group)
        return tensor


@dataclass(frozen=True, slots=True)
class Work:
    """A send under way: the tensor must live, unchanged, until it is finished."""

    tensor: Tensor
    handle: dist.Work
    peer: int


class Transfers:
    """Bounded tensor transfers between the ranks of one gloo group; ranks are world ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, tensor: Tensor, *, to: int) -> Work:
        """Start a send."""
        with named_failures(f"send to rank {to}"):
            handle = dist.isend(tensor, to, group=self._group)
        assert handle is not None, "this rank is not in the group"
        return Work(tensor, handle, to)

    def finish(self, work: Work) -> None:
        """Return when the send is done, or raise the LinkError that ended it."""
        with named_failures(f"send to rank {work.peer}"):
            work.handle.wait()

    def receive(self, tensor: Tensor, *, source: int) -> None:
        """Fill `tensor` from `source`."""
        with named_failures(f"receive from rank {source}"):
            dist.recv(tensor, source, group=self._group)

    def broadcast(self, tensor: Tensor, *, root: int) -> None:
        """Fill `tensor` on every rank of the group with the root's."""
        with named_failures(f"broadcast from rank {root}"):
            dist.broadcast(tensor, root, group=self._group)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """What a rank of a multi-process plan communicates with. `None`: this rank is not in it."""

    link: Transfers | None
    """Rank0 and the leader of a pipelined generator group."""
    mesh: Transfers | None
    """Messages inside the generator group."""
    sums: TorchCollectives | None
    """The generator group as its models see it."""


def join_world(config: RuntimeConfig) -> None:
    """Join all ranks of the launcher (torchrun's variables name the meeting point).

    Raises:
        LinkError: the other ranks did not come within the group timeout.
    """
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(config.local_rank)
    with named_failures("meeting the other ranks"):
        dist.init_process_group(backend, timeout=timedelta(seconds=config.group_timeout_s))


def exchange(payload: bytes) -> list[bytes]:
    """Every rank's `payload`, by rank: one small gather over all ranks."""
    with named_failures("exchange between all ranks"):
        world = dist.get_world_size()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([len(payload)]))
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(parts, padded)
    return [bytes(part[: int(size)].tolist()) for part, size in zip(parts, sizes, strict=True)]


def build_groups(config: RuntimeConfig, topology: Topology) -> ProcessGroups:
    """The groups of `topology`; every rank calls this once, after parity was checked."""
    group_s, idle_s = (
        timedelta(seconds=bound) for bound in (config.group_timeout_s, config.idle_timeout_s)
    )
    generators, rank = list(topology.generator_ranks), config.rank
    sums = dist.new_group(generators, timeout=group_s)
    mesh = dist.new_group(generators, timeout=idle_s, backend="gloo")
    link = None
    if topology.pipelined:
        link = dist.new_group([0, topology.leader], timeout=idle_s, backend="gloo")
    in_mesh = rank in generators
    return ProcessGroups(
        link=Transfers(link) if link is not None and rank in (0, topology.leader) else None,
        mesh=Transfers(mesh) if in_mesh else None,
        sums=TorchCollectives(sums) if in_mesh else None,
    )


def leave_world() -> None:
    """Release the groups; safe to call when none were made."""
    if dist.is_initialized():
        dist.destroy_process_group()
