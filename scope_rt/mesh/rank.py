"""One rank from start to end: meet, compare, load, run, leave.

Parity keys are exchanged over all ranks before any group of the plan exists, so ranks that disagree
raise the same error everywhere instead of waiting for each other. Then all compare the weights they
loaded with the checkpoint, and continue at rank0's resume point.
"""

from dataclasses import dataclass, field, replace

import torch

from scope_contracts.cache_spec import CacheChoice, KVCacheSpec
from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.lifecycle import Lifecycle, StreamPosition
from scope_contracts.parity import ParityKeys
from scope_rt import __version__
from scope_rt.attention.backend import AttentionBackend, backend_named, default_backend
from scope_rt.collectives import SoloCollectives
from scope_rt.config import RECOMPUTE_NEVER, RuntimeConfig
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.mesh.full_pipeline import DERIVED, FullPipeline
from scope_rt.mesh.link import GroupLink, PeerLink
from scope_rt.mesh.loaded import MeshResumePoint, RankLoaded, decode_loaded, encode_loaded
from scope_rt.mesh.peer_check import PeerCheck, no_peers
from scope_rt.mesh.process_group import (
    ProcessGroups,
    Transfers,
    World,
    join_world,
)
from scope_rt.mesh.topology import Topology, plan_named
from scope_rt.mesh.worker import LocalMesh, RemoteMesh, Worker, serve_follower, serve_leader
from scope_rt.models.fingerprint import Fingerprint
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.loading import ModelFolder
from scope_rt.models.noise import SeededNoise
from scope_rt.models.past import Past, own_past
from scope_rt.models.shards import is_sharded
from scope_rt.tensors import NAMES
from scope_rt.trace import Span, decode_spans, encode_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What every rank of a stream must be given alike; compared before the stream starts."""

    model: ModelFolder
    topology: Topology
    config: RuntimeConfig
    dtype: torch.dtype
    height: int
    width: int
    recompute_every: int = RECOMPUTE_NEVER
    recompute_anchor: str = ""
    cache: CacheChoice = field(default_factory=CacheChoice)
    past: Past = own_past

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend in effect: the one asked for, or the device's default."""
        default = default_backend(self.device, self.dtype)
        return backend_named(self.config.kv_bias_backend or default)

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", self.config.local_rank)
        return torch.device("cpu")

    def parity_keys(self) -> ParityKeys:
        """What this rank would do; where the environment contradicts it, what that asks for."""
        plan, config = self.topology.plan_id, self.config
        pipelined = self.topology.pipelined
        return ParityKeys(
            plan_id=plan if config.tp_plan is None else plan_named(config.tp_plan),
            pp_enabled=pipelined if config.pp_enabled is None else config.pp_enabled,
            kv_cache_recompute_every=self.recompute_every,
            kv_bias_backend=self.backend.name,
            kv_cache=str(self.cache),
            recompute_anchor=self.recompute_anchor,
            tp_allow_compile=config.tp_allow_compile,
            digest_every=config.digest_every,
            input_digest=config.input_digest,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
            slow_rank_factor=config.slow_rank_factor,
            dtype=NAMES[self.dtype],
            torch_version=str(torch.__version__),
            package_version=__version__,
            model_fingerprint=self.model.fingerprint(self.dtype),
            world_layout=f"{plan} tp={self.topology.tp_degree} {self.height}x{self.width}",
        )

    def check_environment(self) -> None:
        """Refuse environment variables that ask for another plan than the arguments do.

        Raises:
            UserInputError: naming the variable.
        """
        topology, config = self.topology, self.config
        if config.tp_plan not in (None, topology.plan_id):
            raise UserInputError(
                f"SCOPE_TP_PLAN is {config.tp_plan!r}, --plan is {topology.plan_id}; unset the "
                "variable"
            )
        if config.pp_enabled not in (None, topology.pipelined):
            raise UserInputError(
                f"SCOPE_PP_ENABLED contradicts --plan {topology.plan_id}; unset the variable"
            )
        if config.tp_allow_compile:
            raise UserInputError("SCOPE_TP_ALLOW_COMPILE is not supported yet; unset it")

    def cache_spec(self, geometry: ChunkGeometry) -> KVCacheSpec:
        """The cache of this model at this picture size."""
        _, _, _, rows, columns = geometry.latent_shape(self.height, self.width)
        return KVCacheSpec(
            num_layers=self.model.config.num_layers,
            num_heads=self.model.config.num_attention_heads,
            head_dim=self.model.config.attention_head_dim,
            frame_tokens=rows * columns // 4,
            sink_frames=self.model.recipe.sink_frames,
            window_frames=self.model.recipe.window_frames,
            batch=geometry.batch,
            dtype=NAMES[self.dtype],
            block_frames=self.model.recipe.frames_per_block,
            kind=self.cache.kind,
            codec=self.cache.codec,
        )


class Rank:
    """This process's place in a stream, built on every rank; its order is the protocol.

    It joins the others at once, and is ready after `start`. `pipeline` is what followers of `tp_v0`
    run beside their generator.
    """

    def __init__(
        self,
        setup: RankSetup,
        geometry: ChunkGeometry,
        *,
        instruments: Instruments,
        pipeline: FullPipeline | None = None,
    ) -> None:
        self._setup, self._geometry, self._instruments = setup, geometry, instruments
        is_whole = setup.topology.plan_id is PlanId.TP_V0
        self._pipeline = pipeline if is_whole and setup.config.rank > 0 else None
        self._world: World | None = None
        self._groups = ProcessGroups(link=None, mesh=None, sums=None)
        self._worker: Worker | None = None
        self._fingerprint: Fingerprint | None = None
        topology, config = setup.topology, setup.config
        if config.world_size > 1:
            self._world = join_world(config)
        self._compare_settings()
        topology.check_world_size(config.world_size)
        setup.check_environment()
        if self._world is not None:
            self._groups = self._world.build_groups(topology)
            instruments.checks.heartbeat(self._world.heartbeat.start)

    @property
    def run_id(self) -> str:
        """The same for every start of the ranks by one launcher; empty for a process alone."""
        return "" if self._world is None else self._world.run_id

    def start(self, resume_point: MeshResumePoint | None = None) -> None:
        """Load, and wait until all ranks have; rank0's `resume_point` holds on all of them.

        Blocks for `SCOPE_START_TIMEOUT_S` at most beside the loading itself.

        Raises:
            FingerprintError: a rank holds other weights than the checkpoint.
            LinkError: a rank could not load, or was lost.
        """
        topology, config = self._setup.topology, self._setup.config
        generator = None
        if config.rank in topology.generator_ranks:
            generator = self._load_generator()
        position = self._exchange_loaded(generator, resume_point or MeshResumePoint())
        if generator is not None:
            self._worker = self._make_worker(generator, position)

    def port(self) -> LocalMesh | RemoteMesh:
        """Rank0's way to the generator ranks."""
        if self._worker is not None:
            return LocalMesh(self._worker, self._group_link())
        assert self._groups.link is not None, "rank0 generates, or has a leader to talk to"
        link = self._peer_link(self._groups.link, peer=self._setup.topology.leader)
        return RemoteMesh(link, self._geometry)

    def serve(self) -> None:
        """Run envelopes until rank0 shuts the stream down (mesh ranks)."""
        assert self._worker is not None, "mesh ranks are generator ranks"
        group, faults = self._group_link(), self._instruments.faults
        if self._groups.link is not None:
            link = self._peer_link(self._groups.link, peer=0)
            serve_leader(self._worker, link, group, faults)
        else:
            assert group is not None, "a follower has a leader"
            serve_follower(self._worker, group, faults, self._pipeline)

    def gather_spans(self) -> tuple[Span, ...]:
        """Every rank's spans, on every rank; all ranks call it once, after the shutdown."""
        if self._world is None:
            return self._instruments.trace.spans
        parts = self._world.exchange(encode_spans(self._instruments.trace.spans))
        return tuple(span for part in parts for span in decode_spans(part))

    def leave(self) -> None:
        """Release the groups, if there are any. Idempotent."""
        if self._world is not None:
            self._world.leave()

    def _compare_settings(self) -> None:
        """Raises ParityError on every rank when one would compute differently."""
        reach, checks = self._instruments.faults.reach, self._instruments.checks
        keys = reach(FaultPoint.START, -1, self._setup.parity_keys())
        if self._world is not None:
            all_keys = self._world.exchange(keys.encode())
            checks.settings([ParityKeys.decode(data) for data in all_keys])

    def _exchange_loaded(
        self, generator: ChunkGenerator | None, resume_point: MeshResumePoint
    ) -> StreamPosition:
        """Wait until all ranks have loaded, compare their weights, and return rank0's position.

        A rank that could not load stops all of them here.

        Raises:
            FingerprintError: a rank holds other weights than the checkpoint.
            WireError, FieldError: what a rank sent cannot be read.
        """
        if self._setup.topology.plan_id is not PlanId.TP_V0:
            resume_point = MeshResumePoint(position=resume_point.position)
        mine = RankLoaded(resume_point=resume_point)
        if generator is not None:
            self._fingerprint = Fingerprint(generator.model)
            checkpoint = self._setup.model.checksums(self._setup.dtype)
            mine = replace(mine, held=self._fingerprint.checksums, checkpoint=checkpoint)
        sent = encode_loaded(mine)
        ranks = [sent] if self._world is None else self._world.exchange(sent)
        loaded = [decode_loaded(data) for data in ranks]
        held = {rank: each.held for rank, each in enumerate(loaded) if each.held is not None}
        for each in loaded:
            if each.checkpoint is not None:
                self._instruments.checks.loaded_weights(held, each.checkpoint, is_sharded)
        resumed = loaded[0].resume_point
        if self._pipeline is not None and resumed.memory is not None:
            assert resumed.decoder is not None, "both are state of the same rank0"
            self._pipeline.memory.restore(resumed.memory)
            self._pipeline.decoder.restore(resumed.decoder)
        return resumed.position

    def _group_link(self) -> GroupLink | None:
        topology, mesh = self._setup.topology, self._groups.mesh
        if mesh is None or topology.tp_degree == 1:
            return None
        leader, *followers = topology.generator_ranks
        peers = followers if self._setup.config.rank == leader else [leader]
        return GroupLink([self._peer_link(mesh, peer=peer) for peer in peers])

    def _peer_link(self, transfers: Transfers, *, peer: int) -> PeerLink:
        return PeerLink(
            transfers,
            peer=peer,
            with_digests=self._setup.config.input_digest,
            derived=DERIVED if self._setup.topology.plan_id is PlanId.TP_V0 else frozenset(),
            derive=None if self._pipeline is None else self._pipeline.derive,
            instruments=self._instruments,
        )

    def _load_generator(self) -> ChunkGenerator:
        setup, group = self._setup, self._groups.sums or SoloCollectives()
        spec = setup.cache_spec(self._geometry)
        cache = open_frame_cache(spec, group=group, device=setup.device)
        model = setup.model.transformer(group, dtype=setup.dtype, device=setup.device)
        return ChunkGenerator(
            model=self._instruments.faults.reach(FaultPoint.LOADED, -1, model),
            cache=cache,
            schedule=setup.model.recipe.schedule,
            backend=setup.backend,
            noise=SeededNoise(),
            past=setup.past,
        )

    def _make_worker(self, generator: ChunkGenerator, position: StreamPosition) -> Worker:
        setup, sums = self._setup, self._groups.sums
        return Worker(
            generator=generator,
            geometry=self._geometry,
            lifecycle=Lifecycle.resumed(
                plan_id=setup.topology.plan_id,
                frames_per_block=setup.model.recipe.frames_per_block,
                position=position,
            ),
            peer_check=PeerCheck(
                ranks=setup.topology.generator_ranks,
                rank=setup.config.rank,
                every=setup.config.digest_every,
                gather=None if self._groups.digests is None else self._groups.digests.gather,
                fingerprint=self._fingerprint or Fingerprint(generator.model),
                waited_s=(lambda: 0.0) if sums is None else (lambda: sums.wait_s),
                # Not a method of this object: in a circle, groups would outlive their session.
                check_peers=no_peers if self._world is None else self._world.heartbeat.check,
                slow_factor=setup.config.slow_rank_factor,
                checks=self._instruments.checks,
            ),
            instruments=self._instruments,
        )
