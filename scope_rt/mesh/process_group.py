"""The groups of a plan and their sums; this folder is the only door to `torch.distributed`.

A lost peer or an expired wait leaves here as a `LinkError` that names what was waited for; nothing
is retried or swallowed. No rank of a group is sent anything before it has proved who it is.
All travels over gloo, on the CPU, but for the sums of GPU tensors: those go over NCCL.
"""

import atexit
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from scope_contracts.errors import (
    AuthenticationError,
    LinkError,
    UserInputError,
)
from scope_rt.config import MeshConfig
from scope_rt.environment_names import SECRET_FILE
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.mesh.authentic import GatherSeals
from scope_rt.mesh.failures import Liveness, RankAddresses
from scope_rt.mesh.group import Group, gloo_group
from scope_rt.mesh.handshake import Proving, prove_each_other
from scope_rt.mesh.heartbeat import Heartbeat
from scope_rt.mesh.interface import needed_interface
from scope_rt.mesh.meeting_point import MeetingPoint
from scope_rt.mesh.rendezvous import Meeting, meet
from scope_rt.mesh.reported import GroupError
from scope_rt.mesh.sockets import OpenSocket, local_addresses, open_sockets, shut_down
from scope_rt.mesh.sums import GpuBackend, SumsGroup, TorchCollectives, open_sums
from scope_rt.mesh.survivors import Survivors
from scope_rt.mesh.transfers import Exchange, Transfers
from scope_rt.tensors import of_bytes
from scope_rt.topology import Topology
from scope_rt.watchdog import Watchdog

_MOST_BYTES = 1 << 31
"""Of what one rank says to all."""
_LOG = logging.getLogger(__name__)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Say where a link error happened."""
    try:
        yield
    except LinkError as error:
        raise type(error)(f"{where}: {error.args[0]}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """What a rank of a multi-process plan communicates with. `None`: this rank is not in it."""

    link: Transfers | None
    """Rank0 and the leader of a pipelined generator group."""
    mesh: Transfers | None = None
    """Messages inside the generator group; this and all below None also where it has one rank."""
    sums: TorchCollectives | None = None
    """The generator group as its models see it."""
    digests: Exchange | None = None
    """What generator ranks compare."""


class World:
    """All ranks of one start, connected."""

    def __init__(
        self,
        meeting: Meeting,
        environment: LaunchEnvironment,
        config: MeshConfig,
        *,
        device: torch.device,
        watchdog: Watchdog,
    ) -> None:
        """Connect to the other ranks. Tensors of sums are on `device`; `watchdog` looks after the
        main thread's waits for others.

        Raises:
            AuthenticationError: another process is in the place of a rank.
            LinkError: a rank was lost meanwhile.
        """
        self.run_id = environment.run_id or meeting.run_id
        self.is_authenticated = environment.secret is not None
        self._rank, self._config, self._environment = environment.rank, config, environment
        self._key, ranks = meeting.key, range(meeting.world_size)
        self._seals = GatherSeals(meeting.key.derive("exchange"), ranks, meeting.rank)
        self._sockets: frozenset[OpenSocket] = frozenset()
        self._device, self._watchdog = device, watchdog
        self._gpu: GpuBackend | None = None
        self._all_ranks: Group | None = None
        self.heartbeat = Heartbeat(
            meeting,
            bound_s=config.heartbeat_timeout_s,
            start_s=config.start_timeout_s,
            abort=self._abort,
            is_over=lambda: self._all_ranks is None or not self._all_ranks.is_world,
        )
        """Start it when the groups are built."""
        self.survivors = Survivors(self.heartbeat.values, rank=meeting.rank)
        self._liveness = Liveness(self.heartbeat, watchdog)
        self._others = open_sockets()
        with (
            self._liveness.named_failures("meeting the other ranks"),
            needed_interface(environment),
            meeting.confirming(self.heartbeat.connection),
        ):
            dist.init_process_group(
                "gloo",
                store=meeting.store,
                rank=meeting.rank,
                world_size=meeting.world_size,
                timeout=timedelta(seconds=config.start_timeout_s),
            )
        assert dist.group.WORLD is not None, "it was just built"
        self._all_ranks = Group(dist.group.WORLD)
        with ExitStack() as on_error:
            on_error.callback(leave_world)
            self._prove({"world": (self._all_ranks, ranks)})
            on_error.pop_all()
        # A thread of the store or of a group while the interpreter ends would end it by a signal.
        atexit.register(self.leave)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's `payload`, by rank: one small gather over all ranks.

        Raises:
            AuthenticationError: what arrived is not what a rank of this stream said.
            LinkError: a rank was lost.
        """
        sealed = self._seals.seal(payload)
        with self._liveness.named_failures("exchange between all ranks"):
            world = dist.get_world_size()
            numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
            dist.all_gather(numbers, torch.tensor([len(sealed)]))
            sizes = [int(number) for number in numbers]
            if not 0 < min(sizes) <= max(sizes) <= _MOST_BYTES:
                raise AuthenticationError(f"exchange between all ranks: got {sizes} bytes")
            longest = max(sizes)
            padded = of_bytes(sealed.ljust(longest, b"\0"))
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
            dist.all_gather(parts, padded)
        with located("exchange between all ranks"):
            return self._seals.opened(
                [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]
            )

    def build_groups(self, topology: Topology) -> ProcessGroups:
        """The groups of `topology`; every rank calls this once, after parity was checked.

        Raises:
            AuthenticationError: another process is in the place of a rank.
            LinkError: a rank was lost.
        """
        generators, rank = list(topology.generator_ranks), self._rank
        bound_s, idle_s = self._config.group_timeout_s, self._config.idle_timeout_s
        bound, liveness = timedelta(seconds=bound_s), self._liveness
        ends, shared = (0, topology.leader), len(generators) > 1
        with (
            liveness.named_failures("building the groups of the plan"),
            needed_interface(self._environment),
        ):
            before = open_sockets()
            sums = open_sums(
                generators,
                rank=rank,
                device=self._device,
                timeout_s=bound_s,
                start_s=self._config.start_timeout_s,
            )
            if sums is not None and sums.gpu is not None:
                self._others |= open_sockets() - before  # NCCL has an abort of its own
            mesh = gloo_group(generators, rank=rank, timeout=bound) if shared else None
            pair = gloo_group(ends, rank=rank, timeout=bound) if topology.pipelined else None
        groups: dict[str, tuple[Group, Sequence[int]]] = {}
        if mesh is not None:
            groups["mesh"] = (mesh, generators)
        if sums is not None and sums.gpu is None:  # NCCL can prove nobody's identity
            groups["sums"] = (sums.group, generators)
        if pair is not None:
            groups["link"] = (pair, ends)
        self._prove(groups)
        self._watch(sums)
        link = None
        if pair is not None:
            # Rank0 waits for a chunk, which is under way; a mesh rank waits for rank0's next plan.
            patience_s = bound_s if rank == 0 else idle_s
            key = self._key.derive("link")
            link = Transfers(pair, liveness, key=key, timeout_s=bound_s, patience_s=patience_s)
        if mesh is None or sums is None:
            return ProcessGroups(link=link)
        key, seals = self._key.derive("mesh"), self._key.derive("digests")
        return ProcessGroups(
            link=link,
            mesh=Transfers(mesh, liveness, key=key, timeout_s=bound_s, patience_s=idle_s),
            sums=TorchCollectives(sums, liveness),
            digests=Exchange(mesh, liveness, GatherSeals(seals, generators, rank)),
        )

    def leave(self) -> None:
        """Stop the heartbeat, then release the groups; their threads have ended then. Idempotent.

        Sums of a group that failed are ended first: to release NCCL waits for all its kernels.
        """
        atexit.unregister(self.leave)
        with self._watchdog.section("leaving the other ranks", ends_with_group=True):
            self.heartbeat.stop()
            if self.heartbeat.lost is None:
                leave_world()
                return
            self._abort_gpu()
            self.heartbeat.let_others_read()
            try:
                leave_world()
            except RuntimeError as error:  # of what was ended; why it was is raised elsewhere
                _LOG.warning("a group could not be released: %s", _first_line(error))

    def _prove(self, groups: Mapping[str, tuple[Group, Sequence[int]]]) -> None:
        """By name, each with its ranks. A rank that is there answers as fast as it beats."""
        prove_each_other(
            [
                Proving(group=group, ranks=ranks, key=self._key.derive(f"group {name}"))
                for name, (group, ranks) in groups.items()
            ],
            self._rank,
            liveness=self._liveness,
            timeout=timedelta(seconds=self._config.heartbeat_timeout_s),
        )

    def _watch(self, sums: SumsGroup | None) -> None:
        """Note the connections that `_abort` ends, and the rank behind each address."""
        self._sockets = open_sockets() - self._others
        self._gpu = None if sums is None else sums.gpu
        mine = RankAddresses(addresses=tuple(sorted(local_addresses(self._sockets))))
        by_rank = [RankAddresses.decode(data) for data in self.exchange(mine.encode())]
        self._liveness.rank_by_address = {
            address: rank for rank, each in enumerate(by_rank) for address in each.addresses
        }

    def _abort(self, failure: GroupError) -> None:
        """End every wait of this process for another rank; called from the heartbeat's thread.

        What does not end by that, the watchdog ends.
        """
        self._watchdog.group_failed(failure)
        shut_down(self._sockets)
        self._abort_gpu()

    def _abort_gpu(self) -> None:
        """Blocks until NCCL's kernels have ended, a few times `SCOPE_GROUP_TIMEOUT_S` at most."""
        if self._gpu is not None:
            try:
                self._gpu.abort()
            except RuntimeError as error:
                _LOG.warning("NCCL could not be ended: %s", _first_line(error))


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def join_world(
    environment: LaunchEnvironment,
    config: MeshConfig,
    *,
    device: torch.device | None = None,
    watchdog: Watchdog | None = None,
) -> World:
    """Meet all ranks of the launcher (torchrun's variables name the meeting point).

    `device` is where this rank computes, the CPU by default.

    Raises:
        UserInputError: this process was not launched as a rank.
        AuthenticationError: others came without this rank's secret; it names them.
        LinkError: other ranks did not come within the start timeout; it names them.
    """
    if environment.master_addr is None or not environment.master_port:
        raise UserInputError(
            "this process cannot find the other ranks (MASTER_ADDR or MASTER_PORT is not set); "
            "start it with torchrun"
        )
    device = device or torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if environment.secret is None and environment.rank == 0:
        _LOG.warning(
            "this stream has no secret: whoever reaches its ports can join it; set %s on every "
            "rank; see runbooks/%s.md",
            SECRET_FILE,
            AuthenticationError.runbook,
        )
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
        secret=environment.secret,
    )
    return World(meeting, environment, config, device=device, watchdog=watchdog or Watchdog())


def leave_world() -> None:
    """Release the groups, and return when their threads have ended; safe to call when none were
    made."""
    if dist.is_initialized():
        dist.destroy_process_group()
