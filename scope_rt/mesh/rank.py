"""One rank from start to end: meet, compare, load, run, leave.

Parity keys are exchanged over all ranks before any group of the plan exists, so ranks that disagree
raise the same error everywhere instead of waiting for each other.
"""

from dataclasses import dataclass

import torch

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.lifecycle import Lifecycle
from scope_contracts.parity import ParityKeys, compare
from scope_rt import __version__
from scope_rt.attention.backend import backend_named
from scope_rt.collectives import SoloCollectives
from scope_rt.config import RuntimeConfig
from scope_rt.kv_cache.ring import RingCache
from scope_rt.mesh.link import GroupLink, PeerLink
from scope_rt.mesh.process_group import ProcessGroups, build_groups, exchange, join_world
from scope_rt.mesh.topology import Topology
from scope_rt.mesh.worker import LocalMesh, RemoteMesh, Worker, serve_follower, serve_leader
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.loading import ModelFolder
from scope_rt.models.noise import SeededNoise
from scope_rt.streaming.trace import Span, Trace, decode_spans, encode_spans
from scope_rt.tensors import NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What every rank of a stream must be given alike; compared before the stream starts."""

    model: ModelFolder
    topology: Topology
    config: RuntimeConfig
    dtype: torch.dtype
    height: int
    width: int

    @property
    def device(self) -> torch.device:
        if torch.cuda.is_available():
            return torch.device("cuda", self.config.local_rank)
        return torch.device("cpu")

    def parity_keys(self) -> ParityKeys:
        plan = self.topology.plan_id
        return ParityKeys(
            plan_id=plan,
            pp_enabled=self.topology.pipelined,
            kv_cache_recompute_every=self.config.kv_cache_recompute_every,
            kv_bias_backend=backend_named(self.config.kv_bias_backend).name,
            tp_allow_compile=self.config.tp_allow_compile,
            dtype=NAMES[self.dtype],
            torch_version=str(torch.__version__),
            package_version=__version__,
            model_fingerprint=self.model.fingerprint(),
            world_layout=f"{plan} tp={self.topology.tp_degree} {self.height}x{self.width}",
        )

    def cache_spec(self, geometry: ChunkGeometry) -> KVCacheSpec:
        """The ring of this model at this picture size."""
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
        )


class Rank:
    """This process's place in a stream, built on every rank; its order is the protocol."""

    def __init__(self, setup: RankSetup, geometry: ChunkGeometry, trace: Trace) -> None:
        self._setup, self._geometry, self._trace = setup, geometry, trace
        self._groups = ProcessGroups(link=None, mesh=None, sums=None)
        self._worker: Worker | None = None
        topology, rank = setup.topology, setup.config.rank
        topology.check_world_size(setup.config.world_size)
        if topology.world_size > 1:
            mine = setup.parity_keys().encode()
            join_world(setup.config)
            compare([ParityKeys.decode(keys) for keys in exchange(mine)])
            self._groups = build_groups(setup.config, topology)
        if rank in topology.generator_ranks:
            self._worker = self._load_worker()
        if topology.world_size > 1:
            exchange(b"ready")  # a rank that could not load stops all of them here

    def port(self) -> LocalMesh | RemoteMesh:
        """Rank0's way to the generator ranks."""
        if self._worker is not None:
            return LocalMesh(self._worker, self._group_link())
        assert self._groups.link is not None, "rank0 generates, or has a leader to talk to"
        link = PeerLink(self._groups.link, peer=self._setup.topology.leader)
        return RemoteMesh(link, self._geometry)

    def serve(self) -> None:
        """Run envelopes until rank0 shuts the stream down (mesh ranks)."""
        assert self._worker is not None, "mesh ranks are generator ranks"
        group = self._group_link()
        if self._groups.link is not None:
            serve_leader(self._worker, PeerLink(self._groups.link, peer=0), group)
        else:
            assert group is not None, "a follower has a leader"
            serve_follower(self._worker, group)

    def gather_spans(self) -> tuple[Span, ...]:
        """Every rank's spans, on every rank; all ranks call it once, after the shutdown."""
        if self._setup.topology.world_size == 1:
            return self._trace.spans
        parts = exchange(encode_spans(self._trace.spans))
        return tuple(span for part in parts for span in decode_spans(part))

    def _group_link(self) -> GroupLink | None:
        topology = self._setup.topology
        if self._groups.mesh is None or topology.tp_degree == 1:
            return None
        return GroupLink(
            self._groups.mesh, rank=self._setup.config.rank, ranks=topology.generator_ranks
        )

    def _load_worker(self) -> Worker:
        setup, group = self._setup, self._groups.sums or SoloCollectives()
        ring = RingCache(
            setup.cache_spec(self._geometry),
            tp_degree=group.size,
            dtype=setup.dtype,
            device=setup.device,
        )
        generator = ChunkGenerator(
            model=setup.model.transformer(group, dtype=setup.dtype, device=setup.device),
            ring=ring,
            schedule=setup.model.recipe.schedule,
            backend=backend_named(setup.config.kv_bias_backend),
            noise=SeededNoise(),
        )
        lifecycle = Lifecycle(
            plan_id=setup.topology.plan_id,
            frames_per_block=setup.model.recipe.frames_per_block,
        )
        return Worker(
            generator=generator, geometry=self._geometry, lifecycle=lifecycle, trace=self._trace
        )
