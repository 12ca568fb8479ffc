"""What each rank of a stream holds, by role, and which sizes of the stream could be smaller."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from scope_contracts.cache_spec import CacheChoice, CacheKind, KVCacheSpec
from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.kv_cache.row_view import view_bytes
from scope_rt.placement import Host, device_of
from scope_rt.topology import Topology
from scope_runners.plan_memory.control import DECODE, ControlSize
from scope_runners.plan_memory.model_size import WanSize
from scope_runners.plan_memory.plan import (
    FEWER_BITS,
    RUNTIME,
    MemoryLine,
    MemoryPlan,
    Option,
    Place,
    RankMemory,
)
from scope_runners.plan_memory.verification import Verification

_WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRequirement:
    """The ranks of a stream. `frame_tokens`, window and codec stand in `spec`.

    Raises `UserInputError` when the heads cannot be shared so, or no plan has such a device.
    """

    size: WanSize
    spec: KVCacheSpec
    tp: int
    text_len: int
    plan_id: PlanId
    control: ControlSize
    integrity: IntegrityLevel = IntegrityLevel.DEFAULT
    control_device: str | None = None
    """Of rank0 in a plan in which it only plans and decodes; None is a GPU of its own."""

    def __post_init__(self) -> None:
        if self.control_device is not None and not self.topology.pipelined:
            raise UserInputError(
                f"--control-device: rank0 of plan {self.plan_id} generates, on a GPU of its own; "
                "leave it out, or give --plan pp0 or pp1"
            )
        self.size.check_degree(self.tp)
        self.size.cache_heads(self.tp, _choice(self.spec))

    @property
    def shared_spec(self) -> KVCacheSpec:
        """`spec` with the heads that all ranks hold together."""
        num_heads = self.size.cache_heads(self.tp, _choice(self.spec))
        return replace(self.spec, num_heads=num_heads)

    @property
    def shared_rows(self) -> RowFormat:
        """Of one rank."""
        return self.shared_spec.row_format.shard(self.tp)

    @property
    def topology(self) -> Topology:
        return Topology(plan_id=self.plan_id, tp_degree=self.tp)

    def rank_memory(self) -> tuple[RankMemory, ...]:
        """Control ranks, generator ranks, or ranks that are both."""
        topology = self.topology
        control, generator = tuple(self._control()), tuple(self._generator())
        of_generator = MemoryPlan(lines=(*generator, RUNTIME))
        if topology.pipelined:
            return tuple(self._pipelined(control, of_generator))
        of_both = MemoryPlan(lines=(*_taking_turns(generator, control), RUNTIME))
        role, ranks = "control and generator", topology.generator_ranks
        if self.plan_id is not PlanId.TP_V1_1:  # in tp_v0 every rank runs the whole pipeline
            return (RankMemory(role=role, ranks=ranks, plan=of_both),)
        return (
            RankMemory(role=role, ranks=ranks[:1], plan=of_both),
            RankMemory(role="generator", ranks=ranks[1:], plan=of_generator),
        )

    def _pipelined(
        self, control: tuple[MemoryLine, ...], of_generator: MemoryPlan
    ) -> Iterator[RankMemory]:
        """Rank0, with the generator rank whose GPU it has, if any; and the others."""
        ranks, with_control = self.topology.generator_ranks, self._ranks_with_control()
        of_control = MemoryPlan(lines=(*control, RUNTIME))
        if with_control is None:
            yield RankMemory(
                role="control", ranks=(0,), plan=MemoryPlan(lines=control), place=Place.CPU
            )
        elif with_control:  # at the same time, so that neither has the other's workspace
            yield RankMemory(
                role="control and generator",
                ranks=(0, *with_control),
                plan=MemoryPlan(lines=(*of_control.lines, *of_generator.lines)),
                place=Place.ONE_GPU,
            )
        else:
            yield RankMemory(role="control", ranks=(0,), plan=of_control)
        if others := tuple(rank for rank in ranks if rank not in (with_control or ())):
            yield RankMemory(role="generator", ranks=others, plan=of_generator)

    def _ranks_with_control(self) -> tuple[int, ...] | None:
        """Those on the GPU of rank0, at most one; None where that is on the CPU."""
        topology, control = self.topology, self.control_device
        if control is None:
            return ()
        index = control.partition(":")[2]
        num_gpus = max(self.tp, int(index) + 1 if index.isdecimal() else 0)
        host = Host(first_rank=0, num_ranks=topology.world_size, num_gpus=num_gpus)
        device, *others = (
            device_of(rank, topology, host, control_device=control)
            for rank in range(topology.world_size)
        )
        if device.type == "cpu":
            return None
        return tuple(rank for rank, each in enumerate(others, start=1) if each == device)

    def plan(self) -> MemoryPlan:
        """Bytes of the last rank, which generates in every plan."""
        return self.rank_memory()[-1].plan

    def _control(self) -> Iterator[MemoryLine]:
        verifies, spec = self.integrity is not IntegrityLevel.OFF, self.spec
        if self._ranks_with_control() is None:  # a CPU decodes and encodes text in float32
            spec = replace(spec, dtype=DType.FLOAT32)
        return self.control.lines(spec, self.size, self.text_len, verifies=verifies)

    def _generator(self) -> Iterator[MemoryLine]:
        size, spec, width = self.size, self.spec, self.spec.dtype.num_bytes
        local, num_weights = size.channels(self.tp), size.num_weights(self.tp)
        yield MemoryLine(
            name="weights",
            num_bytes=num_weights * width,
            because=f"{num_weights:,} weights of {width} B",
        )
        yield MemoryLine(
            name="cache",
            num_bytes=self.shared_spec.num_bytes(self.tp),
            because=f"{spec.num_layers} layers x {spec.batch} x {spec.capacity_tokens:,} tokens"
            f" x {self.shared_rows.bytes_per_row:,} B ({_choice(spec)})",
        )
        yield MemoryLine(
            name="text keys and values",
            num_bytes=size.num_layers * spec.batch * self.text_len * 2 * local * width,
            because=f"{size.num_layers} layers x {self.text_len} tokens x 2 x {local} channels",
        )
        if self.integrity is not IntegrityLevel.OFF:
            verification = Verification(
                size=size, spec=self.shared_spec, tp=self.tp, text_len=self.text_len
            )
            yield verification.line(self.integrity)
        yield from self._working()

    def options(self) -> Iterable[Option]:
        """TP degree, bits of the cache, window, a control rank apart, batch."""
        return (
            self._more_ranks(),
            self._fewer_bits(),
            self._windows(),
            self._control_apart(),
            self._batches(),
        )

    def _working(self) -> Iterator[MemoryLine]:
        """Residual, its norm, q, k, v, attention's output, and the feed-forward of one chunk."""
        spec, local = self.spec, self.size.channels(self.tp)
        tokens = spec.batch * spec.block_frames * spec.frame_tokens
        channels = 3 * self.size.dim + 4 * local + 2 * self.size.channels_of_rank(self.tp)
        yield MemoryLine(
            name=_WORKSPACE,
            num_bytes=tokens * channels * spec.dtype.num_bytes,
            because=f"one chunk of {tokens:,} tokens x {channels:,} channels",
            is_estimate=True,
        )
        a_row = view_bytes(self.shared_rows, is_gathered=False)
        if a_row:
            rows = spec.batch * spec.capacity_tokens
            yield MemoryLine(
                name="view of one layer",
                num_bytes=rows * a_row,
                because=f"{rows:,} tokens x {a_row:,} B while they are decoded for attention",
                is_estimate=True,
            )

    def _more_ranks(self) -> Option:
        is_alone = self.plan_id is PlanId.SINGLE
        plan_id = PlanId.TP_V1_1 if is_alone else self.plan_id
        changed = {}
        for tp in self.size.degrees:
            try:
                if tp > self.tp:
                    changed[tp] = replace(self, tp=tp, plan_id=plan_id)
            except UserInputError:
                continue  # heavy hitters refuse heads that are not shared evenly
        return Option(
            flag=f"--plan {plan_id} --tp" if is_alone else "--tp",
            values=list(changed),
            changed_to=changed.__getitem__,
        )

    def _fewer_bits(self) -> Option:
        kind = CacheKind.QUANTIZED if self.spec.kind is CacheKind.RING else self.spec.kind
        changed = {}
        for codec in FEWER_BITS[self.spec.codec]:
            try:
                spec = replace(self.spec, kind=kind, codec=codec)
            except UserInputError:
                continue  # this kind, or this head_dim, does not take the codec
            changed[str(CacheChoice(kind=kind, codec=codec))] = replace(self, spec=spec)
        return Option(flag="--kv-cache", values=list(changed), changed_to=changed.__getitem__)

    def _windows(self) -> Option:
        changed = {}
        for frames in range(self.spec.window_frames - 1, self.spec.block_frames - 1, -1):
            try:
                spec = replace(self.spec, window_frames=frames)
            except UserInputError:
                break  # too short for heavy hitters
            changed[frames] = replace(self, spec=spec)
        return Option(flag="--window", values=list(changed), changed_to=changed.__getitem__)

    def _control_apart(self) -> Option:
        """One more GPU, for a rank that generates nothing; none, where it shares one."""
        if self.control_device is not None:
            return Option(
                flag="--control-device",
                values=["cpu"] if self._ranks_with_control() else [],
                changed_to=lambda device: replace(self, control_device=device),
            )
        return Option(
            flag="--plan",
            values=[PlanId.PP0] if self.plan_id in (PlanId.SINGLE, PlanId.TP_V1_1) else [],
            changed_to=lambda plan_id: replace(self, plan_id=plan_id),
        )

    def _batches(self) -> Option:
        return Option(
            flag="--batch",
            values=range(self.spec.batch - 1, 0, -1),
            changed_to=lambda batch: replace(self, spec=replace(self.spec, batch=batch)),
        )


def _taking_turns(
    generator: Sequence[MemoryLine], control: Sequence[MemoryLine]
) -> Iterator[MemoryLine]:
    """A rank that generates and decodes does one after the other: the larger workspace serves."""
    lines = (*generator, *control)
    workspaces = [line for line in lines if line.name in (_WORKSPACE, DECODE) and line.is_known]
    smaller = min(workspaces, key=lambda line: line.num_bytes) if len(workspaces) > 1 else None
    return (line for line in lines if line is not smaller)


def _choice(spec: KVCacheSpec) -> CacheChoice:
    return CacheChoice(kind=spec.kind, codec=spec.codec)
