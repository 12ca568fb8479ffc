"""The only door to `torch.distributed`: the groups of a plan, their sums, and raw transfers.

A lost peer or an expired wait leaves here as a `LinkError` that names what was waited for; nothing
is retried or swallowed. Messages travel over gloo on the CPU; sums of GPU tensors over NCCL.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from scope_contracts.errors import (
    ContractError,
    LinkError,
    UserInputError,
    mismatch,
)
from scope_rt.config import MeshConfig
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.mesh.failures import Liveness, RankAddresses
from scope_rt.mesh.heartbeat import Heartbeat
from scope_rt.mesh.rendezvous import Meeting, MeetingPoint, meet
from scope_rt.mesh.sockets import OpenSocket, local_addresses, open_sockets, shut_down
from scope_rt.topology import Topology

DIGEST_BYTES = 4096
"""Bytes that one rank sends in an `Exchange`, four of which are the length of its payload."""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say where a link error happened."""
    try:
        yield
    except LinkError as error:
        raise type(error)(f"{where}: {error.args[0]}") from error


class TorchCollectives:
    """`Collectives` over a process group."""

    def __init__(self, group: dist.ProcessGroup, liveness: Liveness) -> None:
        self._group, self._liveness = group, liveness
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.wait_s = 0.0
        """Seconds spent inside sums so far: a rank that waits for slow ones spends many. On a
        GPU a sum is only started here, so the wait is not seen."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        start_s = time.perf_counter()
        with self._liveness.named_failures("all_reduce in the generator group"):
            dist.all_reduce(tensor, group=self._group)
        self.wait_s += time.perf_counter() - start_s
        return tensor


class Exchange:
    """Small payloads to every rank of a group: one all_gather of `DIGEST_BYTES` per rank."""

    def __init__(self, group: dist.ProcessGroup, liveness: Liveness) -> None:
        self._group, self._liveness = group, liveness

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload`, in the order of the group.

        Raises:
            ContractError: the payload is too long; nothing was sent.
            LinkError: a rank was lost.
        """
        most = DIGEST_BYTES - 4
        if len(payload) > most:
            raise ContractError(mismatch("payload", got=len(payload), want=f"at most {most} bytes"))
        frame = (len(payload).to_bytes(4, "little") + payload).ljust(DIGEST_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        with self._liveness.named_failures("exchange in the generator group"):
            dist.all_gather(parts, mine, group=self._group)
        frames = [part.numpy().tobytes() for part in parts]
        return [each[4 : 4 + int.from_bytes(each[:4], "little")] for each in frames]


@dataclass(frozen=True, slots=True)
class Work:
    """A send under way: the tensor must live, unchanged, until it is finished."""

    tensor: Tensor
    handle: dist.Work
    peer: int


class Transfers:
    """Bounded tensor transfers between the ranks of one gloo group; ranks are world ranks."""

    def __init__(
        self, group: dist.ProcessGroup, liveness: Liveness, *, timeout_s: float, patience_s: float
    ) -> None:
        """`timeout_s` bounds every transfer, `patience_s` the wait for a message to begin."""
        self._group, self._liveness = group, liveness
        self._timeout, self._patience = timedelta(seconds=timeout_s), timedelta(seconds=patience_s)

    def send(self, tensor: Tensor, *, to: int) -> Work:
        """Start a send."""
        with self._liveness.named_failures(f"send to rank {to}", peer=to):
            handle = dist.isend(tensor, to, group=self._group)
        assert handle is not None, "this rank is not in the group"
        return Work(tensor, handle, to)

    def finish(self, work: Work) -> None:
        """Return when the send is done, or raise the LinkError that ended it."""
        with self._liveness.named_failures(f"send to rank {work.peer}", peer=work.peer):
            work.handle.wait(self._timeout)

    def receive(self, tensor: Tensor, *, source: int, begins: bool) -> None:
        """Fill `tensor` from `source`; `begins` says that nothing of its message came before."""
        with self._liveness.named_failures(f"receive from rank {source}", peer=source):
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
    digests: Exchange | None = None
    """What generator ranks compare; None also where there is only one."""


class World:
    """All ranks of one start, connected."""

    def __init__(
        self, meeting: Meeting, environment: LaunchEnvironment, config: MeshConfig
    ) -> None:
        """Connect to the other ranks.

        Raises:
            LinkError: a rank was lost meanwhile.
        """
        self.run_id = environment.run_id or meeting.run_id
        self._rank, self._config = environment.rank, config
        self._sockets: frozenset[OpenSocket] = frozenset()
        self._gpu_groups: list[dist.ProcessGroup] = []
        self._default_group: dist.ProcessGroup | None = None
        self.heartbeat = Heartbeat(
            meeting,
            bound_s=config.heartbeat_timeout_s,
            start_s=config.start_timeout_s,
            abort=self._abort,
            is_over=lambda: dist.group.WORLD is not self._default_group,
        )
        """Start it when the groups are built."""
        self._liveness = Liveness(self.heartbeat)
        self._others = open_sockets()
        with_gpu = torch.cuda.is_available()
        with self._liveness.named_failures("meeting the other ranks"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if with_gpu else "gloo",
                store=meeting.store,
                rank=meeting.rank,
                world_size=meeting.world_size,
                timeout=timedelta(seconds=config.start_timeout_s),
            )
        self._default_group = dist.group.WORLD

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload`, by rank: one small gather over all ranks."""
        with self._liveness.named_failures("exchange between all ranks"):
            world = dist.get_world_size()
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
            dist.all_gather(sizes, torch.tensor([len(payload)]))
            longest = max(int(size) for size in sizes)
            padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
            dist.all_gather(parts, padded)
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
        ]

    def build_groups(self, topology: Topology) -> ProcessGroups:
        """The groups of `topology`; every rank calls this once, after parity was checked."""
        generators, rank = list(topology.generator_ranks), self._rank
        bound_s, idle_s = self._config.group_timeout_s, self._config.idle_timeout_s
        bound, liveness = timedelta(seconds=bound_s), self._liveness
        with liveness.named_failures("building the groups of the plan"):
            sums = dist.new_group(generators, timeout=bound)
            mesh = dist.new_group(generators, timeout=bound, backend="gloo")
            pair = None
            if topology.pipelined:
                pair = dist.new_group([0, topology.leader], timeout=bound, backend="gloo")
        self._watch([sums] if rank in generators else [])
        link = None
        if pair is not None and rank in (0, topology.leader):
            # Rank0 waits for a chunk, which is under way; a mesh rank waits for rank0's next plan.
            patience_s = bound_s if rank == 0 else idle_s
            link = Transfers(pair, liveness, timeout_s=bound_s, patience_s=patience_s)
        if rank not in generators:
            return ProcessGroups(link=link, mesh=None, sums=None)
        return ProcessGroups(
            link=link,
            mesh=Transfers(mesh, liveness, timeout_s=bound_s, patience_s=idle_s),
            sums=TorchCollectives(sums, liveness),
            digests=Exchange(mesh, liveness) if len(generators) > 1 else None,
        )

    def leave(self) -> None:
        """Stop the heartbeat, then release the groups. Idempotent."""
        self.heartbeat.stop()
        leave_world()

    def _watch(self, groups: list[dist.ProcessGroup]) -> None:
        """Note the connections that `_abort` ends, and the rank behind each address."""
        self._sockets = open_sockets() - self._others
        if torch.cuda.is_available():
            self._gpu_groups = groups
        mine = RankAddresses(addresses=tuple(sorted(local_addresses(self._sockets))))
        by_rank = [RankAddresses.decode(data) for data in self.exchange(mine.encode())]
        self._liveness.rank_by_address = {
            address: rank for rank, each in enumerate(by_rank) for address in each.addresses
        }

    def _abort(self) -> None:
        """End every wait of this process for another rank; called from the heartbeat's thread."""
        shut_down(self._sockets)
        for group in self._gpu_groups:
            group.abort()


def join_world(environment: LaunchEnvironment, config: MeshConfig) -> World:
    """Meet all ranks of the launcher (torchrun's variables name the meeting point).

    Raises:
        UserInputError: this process was not launched as a rank.
        LinkError: other ranks did not come within the start timeout; it names them.
    """
    if environment.master_addr is None or not environment.master_port:
        raise UserInputError(
            "this process cannot find the other ranks (MASTER_ADDR or MASTER_PORT is not set); "
            "start it with torchrun"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(environment.local_rank)
    point = MeetingPoint(
        host=environment.master_addr,
        port=environment.master_port,
        is_hosted_by_rank0=not environment.store_is_hosted,
    )
    meeting = meet(
        point,
        rank=environment.rank,
        world_size=environment.world_size,
        timeout_s=config.start_timeout_s,
    )
    return World(meeting, environment, config)


def leave_world() -> None:
    """Release the groups; safe to call when none were made."""
    if dist.is_initialized():
        dist.destroy_process_group()
