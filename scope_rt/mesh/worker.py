"""A generator rank: every envelope is admitted in full before the model is entered.

The same `Worker` runs inside rank0 (`single`, `tp_v1_1`) and on mesh ranks. A rank that raises
ends with its error; nothing here catches one around a collective.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from scope_contracts.call_budget import CallBudget
from scope_contracts.envelope import (
    LATENTS_DIGEST,
    LATENTS_DIGEST_BYTES,
    LATENTS_OUT,
    STATE_DIGEST,
    MessageKind,
    PPEnvelope,
    PPResult,
)
from scope_contracts.errors import PreflightError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.lifecycle import Lifecycle
from scope_contracts.parity import HASH_BYTES, ScalarDigest, state_hash
from scope_contracts.tensor_spec import DType, TensorSpec
from scope_rt.faults import FaultPoint, Faults
from scope_rt.instruments import Instruments
from scope_rt.integrity.verifier import Verifier
from scope_rt.mesh.full_pipeline import FullPipeline
from scope_rt.mesh.link import GroupLink, PeerLink
from scope_rt.mesh.peer_check import PeerCheck
from scope_rt.mesh.process_group import located
from scope_rt.mesh.result_wait import ResultWait
from scope_rt.models.generator import ChunkGenerator
from scope_rt.tensors import of_bytes, sha256_of, specs_of

Tensors = Mapping[str, Tensor]
Answer = tuple[PPResult, dict[str, Tensor]]


class Worker:
    """Runs envelopes on this rank's generator, under the lifecycle and a call budget."""

    def __init__(
        self,
        *,
        generator: ChunkGenerator,
        geometry: ChunkGeometry,
        lifecycle: Lifecycle,
        peer_check: PeerCheck,
        result_wait: ResultWait | None = None,
        verifier: Verifier | None = None,
        instruments: Instruments | None = None,
    ) -> None:
        """Without a `verifier`, what the rank holds and computes is not verified; without a
        `result_wait`, no other rank is looked at and the device is waited for without a bound."""
        self._generator, self._geometry = generator, geometry
        self._lifecycle, self._peer_check, self._verifier = lifecycle, peer_check, verifier
        self._result_wait = result_wait or ResultWait(bound_s=math.inf)
        self._instruments = instruments or Instruments()

    def warm_up(self, run: Callable[[ChunkGenerator], None]) -> None:
        """`run` the generator before any chunk of the stream, all ranks of the group together.

        Blocks until it has finished, the start's bound at most.

        Raises:
            LifecycleError: the rank is ready already.
            LinkError: a rank of the group was lost on the way.
        """
        watched = self._instruments.watchdog.section("warming up", ends_with_group=True)
        with located("warming up"), watched:
            run(self._generator)
        self._lifecycle = self._lifecycle.ready()

    def admit(self, envelope: PPEnvelope) -> None:
        """Refuse what may not run here and now, before its tensors or other ranks are involved.

        Raises:
            PreflightError, LifecycleError: naming the field.
        """
        announced = {spec.name: spec for spec in envelope.tensors}
        self._instruments.checks.preflight(envelope, announced, self._geometry)
        self._entered(envelope)

    def execute(self, envelope: PPEnvelope, tensors: Tensors) -> Answer:
        """Generate one chunk that was admitted, or preflighted by rank0 in this process.

        Raises:
            LifecycleError: the envelope may not run here and now.
            ParityError: another generator rank is about to run something else.
            IntegrityError: this rank holds or computed something wrong, or ranks differ in what
                they computed.
            LinkError: a rank of the group was lost on the way.
            ChunkTimeoutError: the device did not finish in time.
        """
        chunk, faults = envelope.chunk_index, self._instruments.faults
        faults.reach(FaultPoint.GENERATOR, chunk, self._generator)
        envelope, tensors = faults.reach(FaultPoint.ENTERED, chunk, (envelope, tensors))
        entered = self._entered(envelope)
        watched = self._instruments.watchdog.section(
            "generating", chunk=chunk, ends_with_group=True
        )
        with located(f"chunk {chunk}"), watched:
            self._peer_check.before(chunk, lambda: self._digest(envelope))
            if self._verifier is not None:
                self._verifier.begin(envelope, tensors)
            start_ns = time.perf_counter_ns()
            budget = CallBudget(chunk, envelope.expected_generator_calls)
            with self._instruments.trace.span(f"generate {chunk}", track="generate"):
                latents = self._generator.generate(
                    envelope, tensors, self._enter_call(budget, envelope)
                )
            # Before any evidence of them: latents of a group that was ended are garbage.
            latents = self._result_wait.on_host(latents, chunk=chunk)
            elapsed_ms = (time.perf_counter_ns() - start_ns) / 1e6
            latents_sha256 = sha256_of(latents)
            verifier = self._verifier
            evidence = None if verifier is None else verifier.end(chunk, latents, latents_sha256)
            self._peer_check.after(chunk, elapsed_ms, evidence)
        self._lifecycle = self._instruments.checks.commit(entered, budget.observed)
        indices, text = self._generator.cache.indices, self._generator.text_digest
        ran = replace(envelope)  # of what it says now: the other has the bytes it was planned with
        out = {
            LATENTS_OUT: latents,
            STATE_DIGEST: of_bytes(state_hash(ran, indices, conditioning=text)),
            LATENTS_DIGEST: of_bytes(bytes.fromhex(latents_sha256)),
        }
        result = PPResult(
            call_id=envelope.call_id,
            chunk_index=chunk,
            cache_epoch=envelope.cache_epoch,
            observed_generator_calls=budget.observed,
            tensors=specs_of(out),
            stage_ms=(("generate", elapsed_ms),),
        )
        return faults.reach(FaultPoint.RESULT, chunk, (result, out))

    def stop(self, envelope: PPEnvelope) -> None:
        """Accept a shutdown; what comes after it is refused.

        Raises:
            IntegrityError: what this rank holds has changed since it was verified last.
        """
        self._lifecycle = self._entered(envelope)
        self.verify_held()

    def verify_held(self) -> None:
        """Verify all that this rank holds, also in the middle of a chunk that cannot be ended.

        Raises:
            IntegrityError: it has changed since it was verified last.
        """
        if self._verifier is not None and self.chunk_index >= 0:
            watchdog = self._instruments.watchdog
            with watchdog.section("verifying what this rank holds", ends_with_group=True):
                self._verifier.close(self.chunk_index)

    @property
    def chunk_index(self) -> int:
        """The last chunk that was entered; -1 before the first."""
        return self._lifecycle.chunk_index

    def _entered(self, envelope: PPEnvelope) -> Lifecycle:
        return self._instruments.checks.enter(self._lifecycle, envelope)

    def _digest(self, envelope: PPEnvelope) -> ScalarDigest:
        """With what the cache keeps by scores: the one thing that does not follow from the plan."""
        cache, text = self._generator.cache, self._generator.text_digest
        digest = ScalarDigest.of(envelope, cache.indices, conditioning=text)
        if not cache.spec.needs_attention_scores:
            return digest
        return replace(digest, frames_kept=cache.frames_kept, scores=cache.scores_digest)

    def _enter_call(self, budget: CallBudget, envelope: PPEnvelope) -> Callable[[], None]:
        """What the generator announces every call to."""
        faults, checks = self._instruments.faults, self._instruments.checks
        chunk = envelope.chunk_index

        def enter() -> None:
            if envelope.do_kv_recompute and budget.observed == 0:
                faults.reach(FaultPoint.RECOMPUTE, chunk, self._generator.cache)
            for _ in range(faults.reach(FaultPoint.CALL, chunk, 1)):
                checks.count_call(budget)

        return enter


class LocalMesh:
    """The `MeshPort` of `single`, `tp_v0` and `tp_v1_1`: rank0's own worker, in lockstep with its
    group."""

    def __init__(self, worker: Worker, group: GroupLink | None) -> None:
        self._worker, self._group = worker, group
        self._answers: deque[Answer] = deque()

    def submit(self, envelope: PPEnvelope, tensors: Tensors) -> None:
        """Send the chunk to the group and generate this rank's part of it.

        Blocks until the chunk is generated; each wait for another rank is bounded by
        `SCOPE_GROUP_TIMEOUT_S`, and ends within `SCOPE_HEARTBEAT_TIMEOUT_S` of a rank's silence.

        Raises:
            LinkError: a rank of the group was lost.
            ParityError, FingerprintError, SlowRankError: ranks differ, where a comparison is due.
            CallCountError, LifecycleError: the envelope may not run as it is.
        """
        if self._group is not None:
            self._group.send(envelope, tensors)
        self._answers.append(self._worker.execute(envelope, tensors))

    def collect(self) -> Answer:
        """The oldest answer; never blocks and raises nothing, since `submit` has made it."""
        return self._answers.popleft()

    def shutdown(self, envelope: PPEnvelope) -> None:
        """Tell the group to end; blocks until that has left, `SCOPE_GROUP_TIMEOUT_S` at most.

        Raises:
            LinkError: a rank of the group was lost.
            LifecycleError: a chunk is still open.
        """
        if self._group is not None:
            self._group.send(envelope, {})
            self._group.flush()
        self._worker.stop(envelope)


class RemoteMesh:
    """The `MeshPort` of `pp0` and `pp1`: a generator group behind its leader."""

    def __init__(self, link: PeerLink, geometry: ChunkGeometry) -> None:
        self._link, self._geometry = link, geometry
        self._sent: deque[PPEnvelope] = deque()

    def submit(self, envelope: PPEnvelope, tensors: Tensors) -> None:
        """Start to send the chunk.

        Blocks until the message before the last has left, for each of its frames
        `SCOPE_GROUP_TIMEOUT_S` at most, and no longer than `SCOPE_HEARTBEAT_TIMEOUT_S` once a rank
        is silent.

        Raises:
            LinkError: a rank was lost; it names the rank where that is known.
        """
        with located(f"chunk {envelope.chunk_index}"):
            self._link.send(envelope, tensors)
        self._sent.append(envelope)

    def collect(self) -> Answer:
        """The answer to the oldest envelope that was submitted.

        Blocks until it begins to arrive and then for each of its frames, each time
        `SCOPE_GROUP_TIMEOUT_S` at most, and no longer than `SCOPE_HEARTBEAT_TIMEOUT_S` once a rank
        is silent.

        Raises:
            LinkError: a rank was lost or did not answer in time.
            PreflightError: the result announces other tensors than the chunk must have.
            WireError, VersionError, FieldError, DigestError: what arrived is not a whole result.
        """
        envelope = self._sent.popleft()
        shape = self._geometry.latent_shape(envelope.height, envelope.width)
        want = (
            TensorSpec(LATENTS_OUT, self._geometry.dtype, shape),
            TensorSpec(STATE_DIGEST, DType.UINT8, (HASH_BYTES,)),
            TensorSpec(LATENTS_DIGEST, DType.UINT8, (LATENTS_DIGEST_BYTES,)),
        )

        def admit(result: PPResult) -> None:
            if result.tensors != want:
                raise PreflightError(
                    f"result of chunk {envelope.chunk_index}: got {result.tensors}, want {want}"
                )

        with located(f"chunk {envelope.chunk_index}"):
            return self._link.receive_result(admit)

    def shutdown(self, envelope: PPEnvelope) -> None:
        """Tell the mesh to end; blocks until all that was sent has left, as `submit` does.

        Raises:
            LinkError: a rank was lost.
        """
        self._link.send(envelope, {})
        self._link.flush()


def serve_leader(worker: Worker, link: PeerLink, group: GroupLink | None, faults: Faults) -> None:
    """Lead a generator group until rank0 shuts it down: admit, pass on, run, answer.

    Blocks between chunks for `SCOPE_IDLE_TIMEOUT_S` at most.
    """
    pass_on = _keep if group is None else group.send
    _serve(worker, link.receive_envelope, faults, pass_on=pass_on, answer=link.send)
    link.flush()
    if group is not None:
        group.flush()


def serve_follower(
    worker: Worker, group: GroupLink, faults: Faults, pipeline: FullPipeline | None
) -> None:
    """Follow the leader of a generator group until it shuts down; blocks as `serve_leader` does."""
    answer = _keep if pipeline is None else pipeline.remember
    _serve(worker, group.receive, faults, pass_on=_keep, answer=answer)


def _keep(message: PPEnvelope | PPResult, tensors: Tensors) -> None:
    """This rank passes on or answers nothing."""


def _serve(
    worker: Worker,
    receive: Callable[[Callable[[PPEnvelope], None]], tuple[PPEnvelope, dict[str, Tensor]]],
    faults: Faults,
    *,
    pass_on: Callable[[PPEnvelope, Tensors], None],
    answer: Callable[[PPResult, Tensors], None],
) -> None:
    while True:
        faults.reach(FaultPoint.IDLE, worker.chunk_index, None)
        envelope, tensors = receive(worker.admit)
        with located(f"chunk {envelope.chunk_index}"):
            pass_on(envelope, tensors)
        if envelope.kind is MessageKind.SHUTDOWN:
            worker.stop(envelope)
            return
        answer(*worker.execute(envelope, tensors))
