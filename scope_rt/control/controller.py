"""THE loop: plan, pack, preflight, send; receive, check, drop or decode, save, emit.

Rank0 walks the same lifecycle as every worker, so an illegal order is refused before a byte is
sent. A result of an older epoch is never decoded and never emitted.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    LATENTS_IN,
    LATENTS_OUT,
    STATE_DIGEST,
    PPEnvelope,
    PPResult,
    shutdown_envelope,
)
from scope_contracts.errors import ScopeError, UserInputError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.lifecycle import Lifecycle
from scope_contracts.parity import ScalarDigest
from scope_rt.control.chunk import Arrived, Chunk
from scope_rt.control.context import ContextMemory
from scope_rt.control.inbox import ControlInbox, Directive, ScheduledDirective, Taken
from scope_rt.control.planner import Planner
from scope_rt.control.position import Position
from scope_rt.control.recording import StreamRecorder
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.models.noise import INITIAL, NoiseSource
from scope_rt.models.past import Past, own_past
from scope_rt.record.snapshot import Checkpoint, StreamState
from scope_rt.tensors import TORCH_DTYPES, digest_of, specs_by_name, specs_of
from scope_rt.vae.codec import StreamingDecoder


class MeshPort(Protocol):
    """The generator ranks as rank0 sees them: what goes in comes out in the same order."""

    def submit(self, envelope: PPEnvelope, tensors: Mapping[str, Tensor]) -> None: ...

    def collect(self) -> tuple[PPResult, dict[str, Tensor]]: ...

    def shutdown(self, envelope: PPEnvelope) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """What the loop drives: the stages of a chunk on rank0, and the shapes they agree on."""

    mesh: MeshPort
    decoder: StreamingDecoder
    memory: ContextMemory
    noise: NoiseSource
    geometry: ChunkGeometry
    cache: KVCacheSpec
    past: Past = own_past


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    envelope: PPEnvelope
    prompt: str
    plan_ms: float
    before: Position
    """Where planning stood, should this chunk have to be planned again."""
    directive: Directive
    state_digest: bytes
    """What the mesh must have run, and where its cache must then stand."""


class Controller:
    """Drives one stream. Only one thread may run it; any thread may post to its `inbox`."""

    def __init__(
        self,
        planner: Planner,
        stages: Stages,
        *,
        max_in_flight: int,
        recorder: StreamRecorder,
        instruments: Instruments | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        settings = planner.settings
        self.inbox = ControlInbox()
        self._position = Position(planner=planner)
        self._stages, self._max_in_flight = stages, max_in_flight
        self._instruments = instruments or Instruments()
        self._checkpoint, self._recorder = checkpoint, recorder
        self._lifecycle = Lifecycle(
            plan_id=settings.plan_id, frames_per_block=settings.recipe.frames_per_block
        )
        self._in_flight: deque[_InFlight] = deque()
        self._unheld: deque[tuple[Arrived, dict[str, Tensor]]] = deque()
        """Chunks the consumer may not hold yet, with the decoder's memory before each."""
        self._num_emitted = 0
        self._num_held: Callable[[], int] = self._all_but_the_last
        self._text_digest = ""
        self._first_epoch = 0
        """Results of older epochs are dropped."""
        self._undecoded = False
        self.is_midway = False
        """Whether an error left the mesh in the middle of a chunk, where nothing can end it."""

    def resume(self, state: StreamState) -> None:
        """Go on where `state` was saved; the mesh stands there too, and holds no cache."""
        settings = state.position.planner.settings
        self._position = state.position
        self._lifecycle = Lifecycle.resumed(
            plan_id=settings.plan_id,
            frames_per_block=settings.recipe.frames_per_block,
            position=state.position.planner.position,
        )
        self._stages.memory.restore(state.memory)
        self._stages.decoder.restore(state.decoder)
        self._unheld = deque((arrived, {}) for arrived in state.unheld)
        self._num_emitted = state.num_held
        self.inbox.schedule(state.coming)

    def run(
        self, num_chunks: int | None = None, *, num_held: Callable[[], int] | None = None
    ) -> Iterator[Chunk]:
        """Emit chunks until `num_chunks` were emitted since the last `begin`, or without end.

        `num_held` tells how many of them the consumer holds for good; by default, all but the one
        it was given last. A resumed stream emits first what its consumer lacks.
        """
        wanted = math.inf if num_chunks is None else num_chunks
        self._num_held = num_held or self._all_but_the_last
        yield from self._emit_again(self._num_emitted if num_held is None else num_held())
        while self._num_emitted < wanted:
            self._fill(wanted)
            arrived = self._arrive()
            if arrived is None:
                continue
            if not self._in_flight and self._max_in_flight > 1:
                self._fill(wanted - 1)  # the mesh would wait for rank0 to decode
            chunk = self._show(arrived)
            self._num_emitted += 1
            if not self._in_flight and self._max_in_flight > 1:
                self._fill(wanted)  # or for the consumer
            self._save()
            yield self._instruments.faults.reach(FaultPoint.EMIT, chunk.chunk_index, chunk)

    def begin(self) -> None:
        """Count chunks from here; what the consumer was given before is held."""
        self._num_emitted = 0
        self._unheld.clear()

    def _fill(self, wanted: float) -> None:
        """Send the mesh as many chunks as may be in flight and will be wanted."""
        while len(self._in_flight) < self._max_in_flight and self._num_wanted() < wanted:
            waits_for_decode = self._undecoded and self._stages.memory.needs_frames
            is_ahead = bool(self._in_flight) or waits_for_decode
            next_index = self._position.planner.next_chunk_index
            # With its context still on the way, a chunk waits; what is asked for meanwhile counts.
            unless = self._position.rebuilds_next if is_ahead else None
            taken = self.inbox.take(next_index, unless=unless)
            if taken is None:
                return
            self._start(taken)

    def _all_but_the_last(self) -> int:
        return self._num_emitted - 1

    def _num_wanted(self) -> int:
        """Chunks that were emitted or are under way and will be."""
        wanted = [s for s in self._in_flight if s.envelope.cache_epoch >= self._first_epoch]
        return self._num_emitted + len(wanted)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """The mesh is in the middle of something; an error in here leaves it there."""
        self.is_midway = True
        yield
        self.is_midway = False

    def close(self) -> None:
        """Receive what is under way, which cannot be stopped, and tell the mesh to end."""
        self.inbox.close()
        while self._in_flight:
            self._collect(self._in_flight.popleft())
        planner = self._position.planner
        self._stages.mesh.shutdown(
            shutdown_envelope(
                plan_id=planner.settings.plan_id,
                call_id=planner.next_call_id,
                chunk_index=max(0, planner.next_chunk_index - 1),
                cache_epoch=max(0, planner.cache_epoch),
            )
        )

    def _start(self, taken: Taken) -> None:
        """Plan one chunk and send it; nothing is sent or advanced unless all checks pass."""
        start_ns, directive = time.perf_counter_ns(), taken.directive
        faults, checks = self._instruments.faults, self._instruments.checks
        try:
            with self._instruments.trace.span("plan", track="control"):
                envelope, following = self._position.next(directive)
                envelope, tensors = self._pack(envelope, following)
                planned = (envelope, tensors)
                envelope, tensors = faults.reach(FaultPoint.PLANNED, envelope.chunk_index, planned)
                checks.preflight(envelope, specs_by_name(tensors), self._stages.geometry)
                entered = checks.enter(self._lifecycle, envelope)
                lifecycle = entered.commit(envelope.expected_generator_calls)
        except ScopeError as error:
            taken.refuse(error)
            raise
        plan_ms = (time.perf_counter_ns() - start_ns) / 1e6
        self._recorder.control(envelope.chunk_index, directive)
        self._recorder.planned(envelope)
        with self._talking():
            messages = faults.reach(FaultPoint.SENDING, envelope.chunk_index, [(envelope, tensors)])
            for message in messages:
                self._stages.mesh.submit(*message)
        if directive.drop_in_flight:
            self._first_epoch = envelope.cache_epoch
        if CONDITIONING_EMBEDS in tensors:
            self._text_digest = digest_of(tensors[CONDITIONING_EMBEDS])
        indices = self._stages.cache.indices_at(lifecycle.cache_end_frame)
        assert following.text is not None
        self._in_flight.append(
            _InFlight(
                envelope=envelope,
                prompt=following.text.prompt,
                plan_ms=plan_ms,
                before=self._position,
                directive=directive,
                state_digest=ScalarDigest.of(
                    envelope, indices, conditioning=self._text_digest
                ).hash(),
            )
        )
        self._position, self._lifecycle = following, lifecycle
        if directive != Directive() and not self._undecoded:
            self._save()  # what is acknowledged outlives this process
        taken.acknowledge(envelope.chunk_index, envelope.cache_epoch)

    def _pack(
        self, envelope: PPEnvelope, following: Position
    ) -> tuple[PPEnvelope, dict[str, Tensor]]:
        """The tensors of a plan, and the envelope that announces them."""
        geometry, text = self._stages.geometry, following.text
        dtype = TORCH_DTYPES[geometry.dtype]
        noise = self._stages.noise.draw(
            base_seed=envelope.base_seed,
            cache_epoch=envelope.cache_epoch,
            chunk_index=envelope.chunk_index,
            step=INITIAL,
            shape=geometry.latent_shape(envelope.height, envelope.width),
        )
        tensors = {LATENTS_IN: noise.to(dtype)}
        if envelope.reset_crossattn_cache or following.planner.settings.bring_up:
            assert text is not None
            tensors[CONDITIONING_EMBEDS] = text.embeds.to(dtype)
        if envelope.do_kv_recompute:
            tensors[CONTEXT_FRAMES_OVERRIDE] = self._stages.memory.context().to(dtype)
        return replace(envelope, tensors=specs_of(tensors)), tensors

    def _arrive(self) -> Arrived | None:
        """Receive the oldest chunk under way; None if its epoch was cut off."""
        started = self._in_flight.popleft()
        envelope, start_ns = started.envelope, time.perf_counter_ns()
        with self._instruments.trace.span("wait", track="control"):
            result, latents = self._collect(started)
        wait_ms = (time.perf_counter_ns() - start_ns) / 1e6
        if self._instruments.checks.is_dropped(result.cache_epoch, self._first_epoch):
            self._recorder.dropped(envelope)
            return None
        if envelope.init_cache:
            self._stages.memory.reset()
        past = self._stages.past(envelope.chunk_index, latents)
        self._stages.memory.remember_latents(past)
        self._undecoded = True
        return Arrived(
            envelope=envelope,
            prompt=started.prompt,
            latents=latents,
            generator_calls=result.observed_generator_calls,
            stage_ms={"plan": started.plan_ms, "wait": wait_ms} | dict(result.stage_ms),
        )

    def _show(self, arrived: Arrived) -> Chunk:
        """Decode what has arrived, remember it, and record it."""
        self._unheld.append((arrived, self._stages.decoder.state()))
        chunk, frames = self._decode(arrived)
        self._stages.memory.remember_frames(frames)
        self._undecoded = False
        self._recorder.finished(chunk)
        return chunk

    def _decode(self, arrived: Arrived) -> tuple[Chunk, Tensor]:
        envelope, start_ns = arrived.envelope, time.perf_counter_ns()
        if envelope.init_cache:
            self._stages.decoder.reset()
        with self._instruments.trace.span(f"decode {envelope.chunk_index}", track="decode"):
            frames = self._stages.decoder.decode(arrived.latents.float())
        decode_ms = (time.perf_counter_ns() - start_ns) / 1e6
        return arrived.shown(frames, decode_ms=decode_ms), frames

    def _emit_again(self, num_held: int) -> Iterator[Chunk]:
        """After a restart: decode what arrived before it, and emit what the consumer lacks."""
        if self._unheld and num_held < self._num_emitted:
            assert self._checkpoint is not None, "what is gone on with was saved"
            raise UserInputError(
                f"the consumer holds {num_held} chunks, the checkpoint {self._checkpoint.path} "
                f"goes on after {self._num_emitted}; delete it to start anew"
            )
        again, self._unheld = [arrived for arrived, _ in self._unheld], deque()
        for arrived in again:
            self._unheld.append((arrived, self._stages.decoder.state()))
            chunk, _ = self._decode(arrived)
            self._num_emitted += 1
            if self._num_emitted > num_held:
                yield chunk

    def _save(self) -> None:
        """Save the stream as it stands between two chunks; never while one waits to be decoded."""
        num_held = min(self._num_held(), self._num_emitted - 1)
        while self._unheld and self._num_emitted - len(self._unheld) < num_held:
            self._unheld.popleft()
        if self._checkpoint is None:
            return
        lost = [s for s in self._in_flight if s.envelope.cache_epoch >= self._first_epoch]
        coming = [
            ScheduledDirective(chunk_index=s.envelope.chunk_index, directive=s.directive)
            for s in lost
        ]
        self._checkpoint.save(
            StreamState(
                position=lost[0].before if lost else self._position,
                coming=(*coming, *self.inbox.scheduled()),
                num_held=self._num_emitted - len(self._unheld),
                unheld=tuple(arrived for arrived, _ in self._unheld),
                decoder=self._unheld[0][1] if self._unheld else self._stages.decoder.state(),
                decoder_after=self._stages.decoder.state(),
                memory=self._stages.memory.state(),
            )
        )

    def _collect(self, started: _InFlight) -> tuple[PPResult, Tensor]:
        """The result of a chunk and its latents, checked to be the answer to its envelope."""
        envelope, checks = started.envelope, self._instruments.checks
        with self._talking():
            answer = self._stages.mesh.collect()
            result, tensors = self._instruments.faults.reach(
                FaultPoint.COLLECTED, envelope.chunk_index, answer
            )
            checks.answer(envelope, result)
            ran = tensors[STATE_DIGEST].numpy().tobytes()
            checks.state(envelope, ran=ran, planned=started.state_digest)
        return result, tensors[LATENTS_OUT]
