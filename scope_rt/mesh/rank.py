"""One rank from start to end: meet, compare, load, run, leave.

Parity keys are exchanged over all ranks before any group of the plan exists, so ranks that disagree
raise the same error everywhere instead of waiting for each other. Then all compare the weights they
loaded with the checkpoint, and continue at rank0's resume point.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from scope_contracts.envelope import PlanId
from scope_contracts.errors import FingerprintError, IntegrityError, LinkError
from scope_contracts.lifecycle import Lifecycle, StreamPosition
from scope_contracts.parity import ParityKeys
from scope_contracts.weights import added_up
from scope_rt.collectives import SoloCollectives
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.integrity.generator_settings import generator_settings
from scope_rt.integrity.verifier import Verifier
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.mesh.full_pipeline import FullPipeline, derived_of
from scope_rt.mesh.link import GroupLink, PeerLink, nothing
from scope_rt.mesh.loaded import (
    MeshResumePoint,
    RankLoaded,
    WeightsLoaded,
    decode_loaded,
    encode_loaded,
)
from scope_rt.mesh.peer_check import PeerCheck
from scope_rt.mesh.process_group import ProcessGroups, World, join_world
from scope_rt.mesh.reported import NO_CHUNK
from scope_rt.mesh.result_wait import ResultWait
from scope_rt.mesh.transfers import Transfers
from scope_rt.mesh.worker import LocalMesh, RemoteMesh, Worker, serve_follower, serve_leader
from scope_rt.models.feedback import Feedback, own_latents
from scope_rt.models.fingerprint import Fingerprint
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.shards import is_sharded
from scope_rt.models.warm_up import warm_up
from scope_rt.numerics import numeric_settings
from scope_rt.stream_identity import check_environment, parity_keys
from scope_rt.stream_setup import StreamSetup
from scope_rt.tensor_digests import NoDigests, TensorDigests
from scope_rt.trace import Span, decode_spans, encode_spans

_READY = b"ready"


class Rank:
    """This process's place in a stream, built on every rank; its order is the protocol.

    It joins the others at once, and is ready after `start`. `pipeline` is what followers of `tp_v0`
    run beside their generator, None on all other ranks.
    """

    def __init__(
        self,
        setup: StreamSetup,
        *,
        instruments: Instruments,
        feedback: Feedback = own_latents,
        pipeline: FullPipeline | None = None,
    ) -> None:
        self._setup, self._instruments, self._feedback = setup, instruments, feedback
        self._pipeline = pipeline
        self._world: World | None = None
        self._groups = ProcessGroups(link=None)
        self._worker: Worker | None = None
        self._fingerprint: Fingerprint | None = None
        topology, environment = setup.topology, setup.environment
        if environment.world_size > 1:
            self._world = join_world(
                environment,
                setup.config.mesh,
                device=setup.device,
                watchdog=instruments.watchdog,
            )
        with ExitStack() as on_error:  # the groups' own threads would abort a process that ends
            on_error.callback(self.leave)
            self._compare_settings()
            topology.check_world_size(environment.world_size)
            check_environment(setup)
            if self._world is not None:
                self._groups = self._world.build_groups(topology)
            on_error.pop_all()
        mesh = setup.config.mesh
        instruments.watchdog.start(chunk_s=mesh.start_timeout_s, grace_s=mesh.heartbeat_timeout_s)
        if self._world is not None:
            instruments.watchdog.tell_others = self._world.heartbeat.report_own
            instruments.checks.heartbeat(self._world.heartbeat.start)

    @property
    def run_id(self) -> str:
        """The same for every start of the ranks by one launcher; empty where there is none."""
        if self._world is None:
            return self._setup.environment.run_id or ""
        return self._world.run_id

    def start(self, resume_point: MeshResumePoint | None = None) -> None:
        """Load and warm up, and wait until all ranks have; rank0's `resume_point` holds on all of
        them.

        Blocks for `SCOPE_START_TIMEOUT_S` at most beside the loading itself.

        Raises:
            FingerprintError: a rank holds other weights than the checkpoint.
            LinkError: a rank could not load, or was lost.
        """
        generator = None
        if self._setup.environment.rank in self._setup.topology.generator_ranks:
            with self._instruments.watchdog.section("loading the model", is_bounded=False):
                generator = self._load_generator()
        position = self._exchange_loaded(generator, resume_point or MeshResumePoint())
        if generator is not None:
            self._worker = self._make_worker(generator, position)
            self._worker.warm_up(self._warm_up)
        if self._world is not None:
            self._world.exchange(_READY)  # nobody's first calls fall into a chunk of another rank

    def _warm_up(self, generator: ChunkGenerator) -> None:
        setup = self._setup
        if setup.warms_up:
            size = {"height": setup.height, "width": setup.width}
            warm_up(generator, setup.recipe, setup.geometry, **size)

    def port(self) -> LocalMesh | RemoteMesh:
        """Rank0's way to the generator ranks."""
        if self._worker is not None:
            return LocalMesh(self._worker, self._group_link())
        assert self._groups.link is not None, "rank0 generates, or has a leader to talk to"
        link = self._peer_link(self._groups.link, peer=self._setup.topology.leader)
        return RemoteMesh(link, self._setup.geometry)

    def serve(self) -> None:
        """Run envelopes until rank0 shuts the stream down (mesh ranks).

        Raises:
            IntegrityError: this rank or another one found something wrong; all raise it.
            LinkError, ContractError, LifecycleError, ParityError: as `Worker.execute`.
        """
        with self.reporting():
            try:
                self._serve()
            except LinkError as loss:
                self._tell_what_is_held(loss)
                raise

    def report(self, error: BaseException, *, chunk: int = NO_CHUNK) -> None:
        """Tell the other ranks why this one will leave, in the middle of `chunk`.

        Blocks for two answers of the store at most.
        """
        if self._world is not None:
            lost = self._world.heartbeat.report_own(error, chunk=chunk)
            self._instruments.watchdog.group_failed(lost)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """What is raised in here makes this rank leave: the others are told why before it does."""
        try:
            yield
        except Exception as error:
            self.report(error, chunk=NO_CHUNK if self._worker is None else self._worker.chunk_index)
            raise

    def verify_survivors(self) -> tuple[int, ...]:
        """After a loss, on rank0: whether the ranks that are left hold what they should.

        Blocks for as long as it takes to read this rank's own state, then `PATIENCE_S` at most.
        Returns the generator ranks that did not vouch for theirs: lost ones can tell no more.

        Raises:
            IntegrityError: what a rank found in what it holds.
        """
        if self._world is None or not self._setup.verifies:
            return ()
        others = set(self._setup.topology.generator_ranks)
        if self._worker is not None:
            self._worker.verify_held()
            others.discard(self._setup.environment.rank)
        return tuple(sorted(others - self._world.survivors.hear(others)))

    def _tell_what_is_held(self, loss: LinkError) -> None:
        """Raises `IntegrityError` where it is not what it should be: rank0 retracts, and does not
        rebuild the cache from what was made of it."""
        if self._world is None or self._worker is None:
            return
        try:
            self._worker.verify_held()
        except IntegrityError as error:
            self._world.survivors.tell(error)
            raise error from loss
        self._world.survivors.tell(None)

    def _serve(self) -> None:
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

    @property
    def _is_authenticated(self) -> bool:
        return self._world is not None and self._world.is_authenticated

    def leave(self) -> None:
        """Release the groups, if there are any. Idempotent."""
        try:
            if self._world is not None:
                self._world.leave()
        finally:
            self._instruments.watchdog.stop()

    def _compare_settings(self) -> None:
        """Raises ParityError on every rank when one would compute differently."""
        reach, checks = self._instruments.faults.reach, self._instruments.checks
        place = self._setup.model.contents.place().encode()
        places = [place] if self._world is None else self._world.exchange(place)
        # Ranks of one folder on one host read the same bytes: those that they load say which.
        keys = parity_keys(self._setup, model_is_shared=len(set(places)) == 1)
        keys = reach(FaultPoint.START, -1, keys)
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
            self._fingerprint = Fingerprint(generator.model, self._groups.sums)
            weights = WeightsLoaded(
                held=self._fingerprint.checksums,
                used=generator.model.as_read.used,
                stored=generator.model.as_read.stored,
                known=self._setup.model.known_digests() or {},
            )
            mine = replace(mine, weights=weights)
        sent = encode_loaded(mine)
        ranks = [sent] if self._world is None else self._world.exchange(sent)
        loaded = [decode_loaded(data) for data in ranks]
        self._check_weights({r: each.weights for r, each in enumerate(loaded) if each.weights})
        resumed = loaded[0].resume_point
        if self._pipeline is not None and resumed.tail is not None:
            self._pipeline.rebuild(resumed.tail)
        return resumed.position

    def _check_weights(self, ranks: Mapping[int, WeightsLoaded]) -> None:
        """What ranks hold is what they read, and that is what the files are known to hold; from
        here on it is known.

        Raises:
            FingerprintError: naming the weight.
            ModelDamageError: the same, where the file itself is not what its manifest says.
        """
        check, model = self._instruments.checks.loaded_weights, self._setup.model
        used = added_up({rank: each.used for rank, each in ranks.items()}, is_sharded)
        check({rank: each.held for rank, each in ranks.items()}, used, is_sharded)
        stored = {rank: each.stored for rank, each in ranks.items()}
        whole = added_up(stored, is_sharded)
        try:
            check(stored, whole, is_sharded)  # what each has read all of
            for known in (each.known for each in ranks.values() if each.known):
                check(stored, known, is_sharded)
        except FingerprintError:
            model.check_files(whole)
            raise
        if not all(each.known for each in ranks.values()):
            leader = self._setup.topology.leader
            model.learn(whole, keep=self._setup.environment.rank == leader)

    def _group_link(self) -> GroupLink | None:
        topology, mesh = self._setup.topology, self._groups.mesh
        if mesh is None or topology.tp_degree == 1:
            return None
        leader, *followers = topology.generator_ranks
        peers = followers if self._setup.environment.rank == leader else [leader]
        return GroupLink([self._peer_link(mesh, peer=peer) for peer in peers])

    def _peer_link(self, transfers: Transfers, *, peer: int) -> PeerLink:
        return PeerLink(
            transfers,
            peer=peer,
            with_digests=self._setup.config.mesh.input_digest or self._is_authenticated,
            derived_of=derived_of if self._setup.topology.plan_id is PlanId.TP_V0 else nothing,
            derive=None if self._pipeline is None else self._pipeline.derive,
            instruments=self._instruments,
        )

    def _load_generator(self) -> ChunkGenerator:
        setup, group = self._setup, self._groups.sums or SoloCollectives()
        cache = open_frame_cache(
            setup.cache_spec, group=group, device=setup.device, finds_damage=self._setup.verifies
        )
        model = setup.model.transformer(group, dtype=setup.dtype, device=setup.device)
        return ChunkGenerator(
            model=self._instruments.faults.reach(FaultPoint.LOADED, -1, model),
            cache=cache,
            schedule=setup.recipe.schedule,
            backend=setup.backend,
            noise=setup.noise,
            recompute_text=setup.recipe.recompute_text,
            recaches=setup.recipe.recaches,
            positions=setup.recipe.positions,
            observe=setup.observe_call,
            feedback=self._feedback,
            derived=TensorDigests() if self._setup.verifies else NoDigests(),
        )

    def _make_worker(self, generator: ChunkGenerator, position: StreamPosition) -> Worker:
        setup, sums = self._setup, self._groups.sums
        return Worker(
            generator=generator,
            geometry=setup.geometry,
            lifecycle=Lifecycle.resumed(
                plan_id=setup.topology.plan_id,
                frames_per_block=setup.recipe.frames_per_block,
                recaches=setup.recipe.recaches,
                position=position,
            ).warming_up(),
            peer_check=PeerCheck(
                ranks=setup.topology.generator_ranks,
                rank=setup.environment.rank,
                every=setup.config.mesh.digest_every,
                gather=None if self._groups.digests is None else self._groups.digests.gather,
                waited_s=(lambda: 0.0) if sums is None else (lambda: sums.wait_s),
                slow_factor=setup.config.mesh.slow_rank_factor,
                numerics=numeric_settings if setup.verifies else tuple,
                generator_settings=generator_settings(generator) if setup.verifies else tuple,
                checks=self._instruments.checks,
            ),
            result_wait=self._result_wait(),
            verifier=self._verifier_of(generator) if self._setup.verifies else None,
            instruments=self._instruments,
        )

    def _result_wait(self) -> ResultWait:
        mesh, world, sums = self._setup.config.mesh, self._world, self._groups.sums
        if world is None:
            return ResultWait(bound_s=mesh.start_timeout_s)

        # Not a method of this object: in a circle, groups would outlive their session.
        def check_group() -> None:
            world.heartbeat.check()
            if sums is not None:
                sums.check()

        return ResultWait(bound_s=mesh.group_timeout_s, check_group=check_group)

    def _verifier_of(self, generator: ChunkGenerator) -> Verifier:
        config = self._setup.config.integrity
        assert self._fingerprint is not None, "a generator rank has loaded"
        return Verifier(
            generator,
            weights=self._fingerprint.digests,
            rank=self._setup.environment.rank,
            level=config.level,
            within=config.verify_within,
            checks=self._instruments.checks,
        )
