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

from scope_contracts.errors import LinkError, LinkTimeoutError, PeerLostError, UserInputError
from scope_rt.config import RuntimeConfig
from scope_rt.mesh.topology import Topology


@contextmanager
def named_failures(what: str) -> Iterator[None]:
    """Turn a backend's RuntimeError into the link error that says what it means."""
    try:
        yield
    except RuntimeError as error:
        raise _link_error(what, str(error)) from error


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say where a link error happened."""
    try:
        yield
    except LinkError as error:
        raise type(error)(f"{where}: {error.args[0]}") from error


def _link_error(what: str, text: str) -> LinkError:
    said = re.sub(r"^\[[^]]*\]\s*", "", text.partition("\n")[0])[:160]  # without gloo's source path
    lowered = text.lower()
    if "timed out" in lowered or "timeout" in lowered:
        return LinkTimeoutError(f"{what}: no answer within the bound")
    if "address already in use" in lowered or "eaddrinuse" in lowered:
        return LinkError(f"{what}: MASTER_PORT is taken; choose another")
    if any(sign in lowered for sign in ("closed", "reset", "broken pipe", "connection refused")):
        return PeerLostError(f"{what}: the peer is gone ({said})")
    return LinkError(f"{what}: {said}")


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

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float, patience_s: float) -> None:
        """`timeout_s` bounds every transfer, `patience_s` the wait for a message to begin."""
        self._group = group
        self._timeout, self._patience = timedelta(seconds=timeout_s), timedelta(seconds=patience_s)

    def send(self, tensor: Tensor, *, to: int) -> Work:
        """Start a send."""
        with named_failures(f"send to rank {to}"):
            handle = dist.isend(tensor, to, group=self._group)
        assert handle is not None, "this rank is not in the group"
        return Work(tensor, handle, to)

    def finish(self, work: Work) -> None:
        """Return when the send is done, or raise the LinkError that ended it."""
        with named_failures(f"send to rank {work.peer}"):
            work.handle.wait(self._timeout)

    def receive(self, tensor: Tensor, *, source: int, begins: bool) -> None:
        """Fill `tensor` from `source`; `begins` says that nothing of its message came before."""
        with named_failures(f"receive from rank {source}"):
            handle = dist.irecv(tensor, source, group=self._group)
            assert handle is not None, "this rank is not in the group"
            handle.wait(self._patience if begins else self._timeout)


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
    try:
        with named_failures("meeting the other ranks"):
            dist.init_process_group(backend, timeout=timedelta(seconds=config.start_timeout_s))
    except ValueError as error:
        raise UserInputError(
            f"this process cannot find the other ranks ({error}); start it with torchrun"
        ) from error


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
    generators, rank = list(topology.generator_ranks), config.rank
    bound_s, idle_s = config.group_timeout_s, config.idle_timeout_s
    bound = timedelta(seconds=bound_s)
    sums = dist.new_group(generators, timeout=bound)
    mesh = dist.new_group(generators, timeout=bound, backend="gloo")
    link = None
    if topology.pipelined:
        pair = dist.new_group([0, topology.leader], timeout=bound, backend="gloo")
        # Rank0 waits for a chunk, which is under way; a mesh rank waits for rank0's next idea.
        link = Transfers(pair, timeout_s=bound_s, patience_s=bound_s if rank == 0 else idle_s)
    in_mesh = rank in generators
    return ProcessGroups(
        link=link if rank in (0, topology.leader) else None,
        mesh=Transfers(mesh, timeout_s=bound_s, patience_s=idle_s) if in_mesh else None,
        sums=TorchCollectives(sums) if in_mesh else None,
    )


def leave_world() -> None:
    """Release the groups; safe to call when none were made."""
    if dist.is_initialized():
        dist.destroy_process_group()
