"""A generator rank: every envelope is admitted in full before the model is entered.

The same `Worker` runs inside rank0 (`single`, `tp_v1_1`) and on mesh ranks. A rank that raises
dies loudly; nothing here catches an error around a collective.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping

from torch import Tensor

from scope_contracts.envelope import LATENTS_OUT, MessageKind, PPEnvelope, PPResult
from scope_contracts.errors import PreflightError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.lifecycle import Lifecycle
from scope_contracts.preflight import preflight
from scope_contracts.tensor_spec import TensorSpec
from scope_rt.mesh.budget import CallBudget
from scope_rt.mesh.link import GroupLink, PeerLink
from scope_rt.mesh.process_group import located
from scope_rt.models.generator import ChunkGenerator
from scope_rt.streaming.trace import Trace
from scope_rt.tensors import specs_of

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
        trace: Trace,
    ) -> None:
        self._generator, self._geometry, self._trace = generator, geometry, trace
        self._lifecycle = lifecycle

    def admit(self, envelope: PPEnvelope) -> None:
        """Refuse what may not run here and now, before its tensors or other ranks are involved.

        Raises:
            PreflightError, LifecycleError: naming the field.
        """
        announced = {spec.name: spec for spec in envelope.tensors}
        preflight(envelope, announced, self._geometry)
        self._lifecycle.enter(envelope)

    def execute(self, envelope: PPEnvelope, tensors: Tensors) -> Answer:
        """Generate one chunk that was admitted, or preflighted by rank0 in this process.

        Raises:
            LifecycleError: the envelope may not run here and now.
            LinkError: a rank of the group was lost on the way.
        """
        self._lifecycle = self._lifecycle.enter(envelope)
        budget = CallBudget(envelope.chunk_index, envelope.expected_generator_calls)
        start_ns = time.perf_counter_ns()
        with (
            self._trace.span(f"generate {envelope.chunk_index}", track="generate"),
            located(f"chunk {envelope.chunk_index}"),
        ):
            latents = self._generator.generate(envelope, tensors, budget.enter)
        self._lifecycle = self._lifecycle.commit(budget.observed)
        out = {LATENTS_OUT: latents.cpu()}
        elapsed_ms = (time.perf_counter_ns() - start_ns) / 1e6
        result = PPResult(
            call_id=envelope.call_id,
            chunk_index=envelope.chunk_index,
            cache_epoch=envelope.cache_epoch,
            observed_generator_calls=budget.observed,
            tensors=specs_of(out),
            stage_ms=(("generate", elapsed_ms),),
        )
        return result, out

    def stop(self, envelope: PPEnvelope) -> None:
        """Accept a shutdown; what comes after it is refused."""
        self._lifecycle = self._lifecycle.enter(envelope)


class LocalMesh:
    """The port of `single` and `tp_v1_1`: rank0's own worker, in lockstep with its group."""

    def __init__(self, worker: Worker, group: GroupLink | None) -> None:
        self._worker, self._group = worker, group
        self._answers: deque[Answer] = deque()

    def submit(self, envelope: PPEnvelope, tensors: Tensors) -> None:
        if self._group is not None:
            self._group.send(envelope, tensors)
        self._answers.append(self._worker.execute(envelope, tensors))

    def collect(self) -> Answer:
        return self._answers.popleft()

    def shutdown(self, envelope: PPEnvelope) -> None:
        if self._group is not None:
            self._group.send(envelope, {})
            self._group.flush()
        self._worker.stop(envelope)


class RemoteMesh:
    """The port of `pp0` and `pp1`: a generator group behind its leader."""

    def __init__(self, link: PeerLink, geometry: ChunkGeometry) -> None:
        self._link, self._geometry = link, geometry
        self._sent: deque[PPEnvelope] = deque()

    def submit(self, envelope: PPEnvelope, tensors: Tensors) -> None:
        with located(f"chunk {envelope.chunk_index}"):
            self._link.send(envelope, tensors)
        self._sent.append(envelope)

    def collect(self) -> Answer:
        envelope = self._sent.popleft()
        shape = self._geometry.latent_shape(envelope.height, envelope.width)
        want = (TensorSpec(LATENTS_OUT, self._geometry.dtype, shape),)

        def admit(result: PPResult) -> None:
            if result.tensors != want:
                raise PreflightError(
                    f"result of chunk {envelope.chunk_index}: got {result.tensors}, want {want}"
                )

        with located(f"chunk {envelope.chunk_index}"):
            return self._link.receive_result(admit)

    def shutdown(self, envelope: PPEnvelope) -> None:
        self._link.send(envelope, {})
        self._link.flush()


def serve_leader(worker: Worker, link: PeerLink, group: GroupLink | None) -> None:
    """Lead a generator group until rank0 shuts it down: admit, pass on, run, answer."""
    pass_on = _keep if group is None else group.send
    _serve(worker, link.receive_envelope, pass_on=pass_on, answer=link.send)
    link.flush()
    if group is not None:
        group.flush()


def serve_follower(worker: Worker, group: GroupLink) -> None:
    """Follow the leader of a generator group until it shuts down."""
    _serve(worker, group.receive, pass_on=_keep, answer=_keep)


def _keep(message: PPEnvelope | PPResult, tensors: Tensors) -> None:
    """Nobody waits for it."""


def _serve(
    worker: Worker,
    receive: Callable[[Callable[[PPEnvelope], None]], tuple[PPEnvelope, dict[str, Tensor]]],
    *,
    pass_on: Callable[[PPEnvelope, Tensors], None],
    answer: Callable[[PPResult, Tensors], None],
) -> None:
    while True:
        envelope, tensors = receive(worker.admit)
        pass_on(envelope, tensors)
        if envelope.kind is MessageKind.SHUTDOWN:
            worker.stop(envelope)
            return
        answer(*worker.execute(envelope, tensors))
