"""The in-flight window: plan, pack, check, send; receive, check, or drop what a hard cut ended.

Nothing is sent and nothing advances unless all checks pass: rank0 walks the same lifecycle as every
worker, so an illegal order is refused before a byte leaves.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto

from torch import Tensor

from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    INPUT_LATENTS,
    LATENTS_DIGEST,
    LATENTS_IN,
    LATENTS_OUT,
    RECOMPUTE_EMBEDS,
    STATE_DIGEST,
    PPEnvelope,
    PPResult,
    shutdown_envelope,
)
from scope_contracts.integrity import suspect_from
from scope_contracts.lifecycle import Lifecycle
from scope_contracts.parity import state_hash
from scope_rt.control.chunk import Arrived
from scope_rt.control.in_flight import InFlight
from scope_rt.control.inbox import Directive
from scope_rt.control.log_entries import (
    control_records,
    dropped_record,
    planned_record,
)
from scope_rt.control.plan_check import PlanCheck
from scope_rt.control.position import Position
from scope_rt.control.proved_latents import ProvedLatents
from scope_rt.control.stages import Stages
from scope_rt.control.start_frame import StartFrame
from scope_rt.control.video_input import InputLatents
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.models.noise import INITIAL
from scope_rt.record.log import Log
from scope_rt.tensors import TORCH_DTYPES, bytes_of, digest_of, sha256_of, specs_by_name, specs_of


class _Received(Enum):
    """What has become of the chunk that was received last."""

    DELIVERED = auto()
    NOT_DECODED = auto()
    NOT_DELIVERED = auto()


class Pipeline:
    """At most `max_in_flight` chunks between planning and delivery, in order."""

    def __init__(
        self,
        position: Position,
        stages: Stages,
        *,
        max_in_flight: int,
        log: Log,
        instruments: Instruments,
    ) -> None:
        planner = position.planner
        self.position = position
        """Where planning is: after the last chunk that was sent."""
        self.in_flight: deque[InFlight] = deque()
        self.midway_chunk: int | None = None
        """The chunk in the middle of which an error left the mesh, where nothing can end it."""
        self._stages, self._max_in_flight = stages, max_in_flight
        self._log, self._instruments = log, instruments
        self._lifecycle = Lifecycle.resumed(
            plan_id=planner.settings.plan_id,
            frames_per_block=planner.settings.recipe.frames_per_block,
            recaches=planner.settings.recipe.recaches,
            position=planner.counts.position,
        )
        self._plan_check = None
        if stages.values is not None:
            self._plan_check = PlanCheck(position, instruments.checks)
        self._received = _Received.DELIVERED
        self._text_digest = ""
        self.proved = ProvedLatents()
        self._latents_sha256 = ""
        """Of the chunk that was received last, as it arrived."""
        self._first_epoch = 0
        """Results of older epochs are dropped."""

    @property
    def has_room(self) -> bool:
        """Whether one more chunk may be sent: one that is not delivered yet counts as well."""
        undelivered = self._received is not _Received.DELIVERED
        return len(self.in_flight) + undelivered < self._max_in_flight

    @property
    def num_under_way(self) -> int:
        """Chunks that were sent or received, are not decoded yet, and will not be dropped."""
        return len(self.lost_by_a_restart) + self.awaits_decode

    @property
    def awaits_decode(self) -> bool:
        """Whether a chunk was received and its frames are not known yet."""
        return self._received is _Received.NOT_DECODED

    @property
    def lost_by_a_restart(self) -> tuple[InFlight, ...]:
        """The chunks that would have to be planned again; those that a hard cut ended would not."""
        return tuple(
            sent for sent in self.in_flight if sent.envelope.cache_epoch >= self._first_epoch
        )

    def must_wait(self, directive: Directive) -> bool:
        """Whether a chunk planned with `directive` needs what is still on its way here."""
        awaits_frames = self.awaits_decode and self._stages.context.needs_frames
        return bool(self.in_flight or awaits_frames) and self.position.rebuilds_next(directive)

    def send(self, directive: Directive, given: InputLatents | None = None) -> PPEnvelope:
        """Plan one chunk and send it; it begins with what is `given`, where that is anything.

        Raises:
            ContractError, LifecycleError: the plan is refused; nothing was sent or advanced.
            IntegrityError: the plan is not what was asked for; as above.
            LinkError: a rank was lost.
        """
        start_ns, stages, plan_check = time.perf_counter_ns(), self._stages, self._plan_check
        faults, checks = self._instruments.faults, self._instruments.checks
        index = self.position.planner.counts.next_chunk_index
        watched = self._instruments.watchdog.section("planning", chunk=index)
        with self._instruments.trace.span("plan", track="control"), watched:
            noise_scale = None if given is None else given.noise_scale
            envelope, following = self.position.next(directive, noise_scale=noise_scale)
            planned = self._packed(envelope, following, given)
            envelope, tensors = faults.reach(FaultPoint.PLANNED, envelope.chunk_index, planned)
            checks.preflight(envelope, specs_by_name(tensors), stages.geometry)
            self._check_sent(envelope.chunk_index, tensors, following, given)
            entered = checks.enter(self._lifecycle, envelope)
            lifecycle = entered.commit(envelope.expected_generator_calls)
            asked = None
            if plan_check is not None:  # last, of what leaves
                asked = plan_check.verify(directive, envelope, following, noise_scale=noise_scale)
        plan_ms = (time.perf_counter_ns() - start_ns) / 1e6
        for record in control_records(envelope.chunk_index, directive):
            self._log.append(record)
        self._log.append(planned_record(envelope))
        indices = stages.cache.indices_at(lifecycle.cache_end_frame)
        if CONDITIONING_EMBEDS in tensors:
            self._text_digest = digest_of(tensors[CONDITIONING_EMBEDS])
        assert following.text is not None
        sent = InFlight(
            envelope=envelope,
            prompt=following.text.prompt,
            plan_ms=plan_ms,
            before=self.position,
            directive=directive,
            state_digest=state_hash(envelope, indices, conditioning=self._text_digest),
        )
        with self._midway(envelope.chunk_index):
            messages = faults.reach(FaultPoint.SENDING, envelope.chunk_index, [(envelope, tensors)])
            for message in messages:
                stages.mesh.submit(*message)
        if directive.drop_in_flight:
            self._first_epoch = envelope.cache_epoch
        self.in_flight.append(sent)
        self.position, self._lifecycle = following, lifecycle
        if plan_check is not None and asked is not None:
            plan_check.planned(asked)
        return envelope

    def receive(self) -> Arrived | None:
        """The oldest chunk in flight; None if a hard cut has ended its epoch.

        Blocks as `MeshPort.collect` does.

        Raises:
            ContractError: what came is not what was planned.
            IntegrityError: the latents cannot be what a model computes.
            LinkError: a rank was lost.
        """
        sent = self.in_flight.popleft()
        envelope, start_ns = sent.envelope, time.perf_counter_ns()
        with self._instruments.trace.span("wait", track="control"):
            result, latents, latents_sha256 = self._collect(sent)
        wait_ms = (time.perf_counter_ns() - start_ns) / 1e6
        if self._instruments.checks.is_dropped(result.cache_epoch, self._first_epoch):
            self._log.append(dropped_record(envelope))
            return None
        self._check_latents(envelope.chunk_index, latents)
        if self._stages.values is not None and (start := self._start_frame(envelope)) is not None:
            chunk, noted = f"chunk {envelope.chunk_index}", start.latents_sha256
            what = "latents of the start frame"
            self._instruments.checks.kept(chunk, what, now=latents_sha256, noted=noted)
        if envelope.init_cache:
            self._stages.context.reset()
        seen = self._stages.feedback(envelope.chunk_index, latents)
        self._stages.context.remember_latents(seen)
        # And as remembered.
        self.check_kept(envelope.chunk_index, "latents on their way here", latents, latents_sha256)
        self._received = _Received.NOT_DECODED
        return Arrived(
            envelope=envelope,
            prompt=sent.prompt,
            latents=latents,
            latents_sha256=latents_sha256,
            generator_calls=result.observed_generator_calls,
            stage_ms={"plan": sent.plan_ms, "wait": wait_ms} | dict(result.stage_ms),
        )

    def _check_latents(self, chunk: int, latents_BFCHW: Tensor) -> None:
        rules, previous = self._stages.values, self._latents_sha256
        if rules is not None:
            self._latents_sha256 = self.proved.prove(bytes_of(latents_BFCHW))
            repeats, limit = self._latents_sha256 == previous, rules.latent_limit
            with suspect_from(chunk):
                self._instruments.checks.latents(chunk, latents_BFCHW, repeats=repeats, limit=limit)

    def check_kept(
        self, chunk: int, what: str, latents: Tensor | bytes, latents_sha256: str
    ) -> None:
        """Verify that latents, or their bytes, are those that the generator ranks agreed on.

        Raises:
            IntegrityError: naming the chunk, and `what` changed.
        """
        if self._stages.values is not None:
            now_bytes = bytes_of(latents) if isinstance(latents, Tensor) else latents
            now = self.proved.sha256_of(now_bytes, noted=latents_sha256)
            if now == latents_sha256:
                return
            with suspect_from(chunk):
                self._instruments.checks.kept(f"chunk {chunk}", what, now=now, noted=latents_sha256)

    def _check_sent(
        self,
        chunk: int,
        tensors: Mapping[str, Tensor],
        following: Position,
        given: InputLatents | None,
    ) -> None:
        """What leaves is what was encoded, and what arrived of earlier chunks."""
        if self._stages.values is None:
            return
        checks, evidence = self._instruments.checks, list[tuple[str, str, str]]()
        texts = {CONDITIONING_EMBEDS: following.text, RECOMPUTE_EMBEDS: self.position.text}
        for name, text in texts.items():
            if name in tensors and text is not None:
                sent, kept = tensors[name], text.embeds
                evidence += [
                    ("the prompt's embeddings", sha256_of(kept), text.embeds_sha256),
                    ("embeddings to be sent", sha256_of(sent), sha256_of(kept.to(sent.dtype))),
                ]
        if given is not None:
            now = sha256_of(tensors[INPUT_LATENTS])
            evidence += [("latents of the video input", now, given.latents_sha256)]
        if CONTEXT_FRAMES_OVERRIDE in tensors:
            sent = tensors[CONTEXT_FRAMES_OVERRIDE]
            holds_cache = self.position.planner.holds_cache
            evidence += self._stages.context.evidence(sent, holds_cache=holds_cache)
        with suspect_from(chunk):
            for what, now, noted in evidence:
                checks.kept(f"chunk {chunk}", what, now=now, noted=noted)

    def decoded(self, frames_BTHWC: Tensor) -> None:
        """The chunk that was received has these frames; a recompute may need them."""
        self._stages.context.remember_frames(frames_BTHWC)
        self._received = _Received.NOT_DELIVERED

    def begin(self) -> None:
        """Another stream begins, with a hard cut: what is still in flight is dropped."""
        self.delivered()
        if self.in_flight:
            self._first_epoch = self.position.planner.counts.cache_epoch + 1

    def delivered(self) -> None:
        """The consumer gets the chunk that was received: its place is free."""
        self._received = _Received.DELIVERED

    def close(self) -> None:
        """Receive what is in flight, which cannot be stopped, and tell the mesh to end."""
        while self.in_flight:
            self._collect(self.in_flight.popleft())
        planner, counts = self.position.planner, self.position.planner.counts
        self._stages.mesh.shutdown(
            shutdown_envelope(
                plan_id=planner.settings.plan_id,
                call_id=counts.next_call_id,
                chunk_index=max(0, counts.next_chunk_index - 1),
                cache_epoch=max(0, counts.cache_epoch),
            )
        )

    def _packed(
        self, envelope: PPEnvelope, following: Position, given: InputLatents | None
    ) -> tuple[PPEnvelope, dict[str, Tensor]]:
        """The envelope that announces its tensors, and these."""
        geometry, text = self._stages.geometry, following.text
        dtype = TORCH_DTYPES[geometry.dtype]
        tensors = {LATENTS_IN: self._latents_in(envelope)}
        if envelope.reset_crossattn_cache or following.planner.settings.bring_up:
            assert text is not None
            tensors[CONDITIONING_EMBEDS] = text.embeds.to(dtype)
        if envelope.do_kv_recompute:
            holds_cache = self.position.planner.holds_cache
            context = self._stages.context.context(holds_cache=holds_cache)
            tensors[CONTEXT_FRAMES_OVERRIDE] = context.to(dtype)
            if (lost := self.position.lost_text(following)) is not None:
                tensors[RECOMPUTE_EMBEDS] = lost.embeds.to(dtype)
        if given is not None:
            tensors[INPUT_LATENTS] = given.latents
        return replace(envelope, tensors=specs_of(tensors)), tensors

    def _latents_in(self, envelope: PPEnvelope) -> Tensor:
        """The noise that a chunk is made of, or the latents of the start frame."""
        if (start := self._start_frame(envelope)) is not None:
            return start.latents.clone()  # a chunk is these very numbers, and a consumer's own
        geometry = self._stages.geometry
        noise = self._stages.noise.draw(
            base_seed=envelope.base_seed,
            cache_epoch=envelope.cache_epoch,
            chunk_index=envelope.chunk_index,
            step=INITIAL,
            shape=geometry.latent_shape(envelope.height, envelope.width),
        )
        return noise.to(TORCH_DTYPES[geometry.dtype])

    def _start_frame(self, envelope: PPEnvelope) -> StartFrame | None:
        """What the chunk of `envelope` is, where it is not denoised."""
        source = self._stages.start_frame
        return source() if source is not None and not envelope.num_denoise_steps else None

    def _collect(self, sent: InFlight) -> tuple[PPResult, Tensor, str]:
        """The result of a chunk, its latents and their digest, checked to answer its envelope."""
        checks, faults = self._instruments.checks, self._instruments.faults
        with self._midway(sent.envelope.chunk_index):
            answer = self._stages.mesh.collect()
            result, tensors = faults.reach(FaultPoint.COLLECTED, sent.envelope.chunk_index, answer)
            checks.answer(sent.envelope, result)
            ran = tensors[STATE_DIGEST].numpy().tobytes()
            checks.state(sent.envelope, ran=ran, planned=sent.state_digest)
        return result, tensors[LATENTS_OUT], tensors[LATENTS_DIGEST].numpy().tobytes().hex()

    @contextmanager
    def _midway(self, chunk: int) -> Iterator[None]:
        """The mesh is in the middle of a chunk; an error in here leaves it there."""
        self.midway_chunk = chunk
        yield
        self.midway_chunk = None
