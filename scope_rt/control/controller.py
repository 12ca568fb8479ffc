"""THE loop: plan, pack, preflight, send; receive, check, drop or decode, emit.

Rank0 walks the same lifecycle as every worker, so an illegal order is refused before a byte is
sent. A result of an older epoch is never decoded and never emitted.
"""

import hashlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    LATENTS_IN,
    LATENTS_OUT,
    PPEnvelope,
    PPResult,
    shutdown_envelope,
)
from scope_contracts.errors import CallCountError, OrderError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.lifecycle import Lifecycle
from scope_contracts.preflight import preflight
from scope_rt.control.inbox import Conditioning, ControlInbox, Directive
from scope_rt.control.planner import Planner
from scope_rt.models.noise import INITIAL, NoiseSource
from scope_rt.streaming.trace import Trace
from scope_rt.tensors import TORCH_DTYPES, specs_of


class MeshPort(Protocol):
    """The generator ranks as rank0 sees them: what goes in comes out in the same order."""

    def submit(self, envelope: PPEnvelope, tensors: Mapping[str, Tensor]) -> None: ...

    def collect(self) -> tuple[PPResult, dict[str, Tensor]]: ...

    def shutdown(self, envelope: PPEnvelope) -> None: ...


class FrameDecoder(Protocol):
    """Latents of an epoch in, frames out; remembers what decoding the next chunk needs."""

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        """uint8 frames `[B, T, H, W, 3]`."""
        ...

    def reset(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One emitted chunk: uint8 `frames` `[T, H, W, 3]` and how they came to be.

    `latents` are the generator's result `[F, C, H/8, W/8]`; `latents_sha256` is over their bytes.
    """

    chunk_index: int
    cache_epoch: int
    prompt: str
    frames: NDArray[np.uint8]
    latents: Tensor
    latents_sha256: str
    generator_calls: int
    stage_ms: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    envelope: PPEnvelope
    prompt: str
    plan_ms: float


class Controller:
    """Drives one stream. Only one thread may run it; any thread may post to its `inbox`."""

    def __init__(
        self,
        *,
        planner: Planner,
        mesh: MeshPort,
        decoder: FrameDecoder,
        geometry: ChunkGeometry,
        noise: NoiseSource,
        trace: Trace,
        max_in_flight: int,
    ) -> None:
        settings = planner.settings
        self.inbox = ControlInbox()
        self._planner, self._mesh, self._decoder = planner, mesh, decoder
        self._geometry, self._noise, self._trace = geometry, noise, trace
        self._max_in_flight = max_in_flight
        self._lifecycle = Lifecycle(
            plan_id=settings.plan_id, frames_per_block=settings.recipe.frames_per_block
        )
        self._text: Conditioning | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._first_epoch = 0
        """Results of older epochs are dropped."""
        self.is_midway = False
        """Whether an error left the mesh in the middle of a chunk, where nothing can end it."""

    def run(self, num_chunks: int | None = None) -> Iterator[Chunk]:
        """Emit `num_chunks` chunks, or chunks without end."""
        wanted = math.inf if num_chunks is None else num_chunks
        while wanted > 0:
            while len(self._in_flight) < self._max_in_flight and self._num_wanted() < wanted:
                self._start(self.inbox.take(self._planner.next_chunk_index))
            chunk = self._finish()
            if chunk is not None:
                wanted -= 1
                yield chunk

    def _num_wanted(self) -> int:
        """Chunks under way that will be emitted."""
        return sum(started.envelope.cache_epoch >= self._first_epoch for started in self._in_flight)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """The mesh is in the middle of something; an error in here leaves it there."""
        self.is_midway = True
        yield
        self.is_midway = False

    def close(self) -> None:
        """Receive what is under way, which cannot be stopped, and tell the mesh to end."""
        while self._in_flight:
            self._collect(self._in_flight.popleft().envelope)
        self._mesh.shutdown(
            shutdown_envelope(
                plan_id=self._planner.settings.plan_id,
                call_id=self._planner.next_call_id,
                chunk_index=max(0, self._planner.next_chunk_index - 1),
                cache_epoch=max(0, self._planner.cache_epoch),
            )
        )

    def _start(self, directive: Directive) -> None:
        """Plan one chunk and send it; nothing is sent or advanced unless all checks pass."""
        start_ns = time.perf_counter_ns()
        with self._trace.span("plan", track="control"):
            new_text = directive.conditioning is not None
            text = directive.conditioning or self._text
            if text is None:
                raise OrderError("the first chunk needs a prompt; post one first")
            envelope, following = self._planner.next(hard_cut=directive.hard_cut, new_text=new_text)
            envelope, tensors = self._pack(envelope, text)
            preflight(envelope, {spec.name: spec for spec in envelope.tensors}, self._geometry)
            lifecycle = self._lifecycle.enter(envelope).commit(envelope.expected_generator_calls)
        plan_ms = (time.perf_counter_ns() - start_ns) / 1e6
        with self._talking():
            self._mesh.submit(envelope, tensors)
        if directive.drop_in_flight:
            self._first_epoch = envelope.cache_epoch
        self._planner, self._lifecycle, self._text = following, lifecycle, text
        self._in_flight.append(_InFlight(envelope=envelope, prompt=text.prompt, plan_ms=plan_ms))

    def _pack(
        self, envelope: PPEnvelope, text: Conditioning
    ) -> tuple[PPEnvelope, dict[str, Tensor]]:
        """The tensors of a plan, and the envelope that announces them."""
        dtype = TORCH_DTYPES[self._geometry.dtype]
        noise = self._noise.draw(
            base_seed=envelope.base_seed,
            cache_epoch=envelope.cache_epoch,
            chunk_index=envelope.chunk_index,
            step=INITIAL,
            shape=self._geometry.latent_shape(envelope.height, envelope.width),
        )
        tensors = {LATENTS_IN: noise.to(dtype)}
        if envelope.reset_crossattn_cache:
            tensors[CONDITIONING_EMBEDS] = text.embeds.to(dtype)
        return replace(envelope, tensors=specs_of(tensors)), tensors

    def _finish(self) -> Chunk | None:
        """Receive the oldest chunk under way and decode it; None if its epoch was cut off."""
        started = self._in_flight.popleft()
        envelope, clock = started.envelope, time.perf_counter_ns
        t0 = clock()
        with self._trace.span("wait", track="control"):
            result, latents = self._collect(envelope)
        t1 = clock()
        if result.cache_epoch < self._first_epoch:
            return None
        if envelope.init_cache:
            self._decoder.reset()
        with self._trace.span(f"decode {envelope.chunk_index}", track="decode"):
            frames = self._decoder.decode(latents.float())[0].numpy()
        t2 = clock()
        raw = latents.contiguous().view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(raw).hexdigest()
        own = {"plan": started.plan_ms, "wait": (t1 - t0) / 1e6, "decode": (t2 - t1) / 1e6}
        return Chunk(
            chunk_index=envelope.chunk_index,
            cache_epoch=envelope.cache_epoch,
            prompt=started.prompt,
            frames=frames,
            latents=latents[0],
            latents_sha256=digest,
            generator_calls=result.observed_generator_calls,
            stage_ms=own | dict(result.stage_ms) | {"digest": (clock() - t2) / 1e6},
        )

    def _collect(self, envelope: PPEnvelope) -> tuple[PPResult, Tensor]:
        """The result of `envelope` and its latents, checked to be the answer to it."""
        with self._talking():
            result, tensors = self._mesh.collect()
        _check_answer(envelope, result)
        return result, tensors[LATENTS_OUT]


def _check_answer(envelope: PPEnvelope, result: PPResult) -> None:
    """Refuse an answer to another question, or one that took another number of calls."""
    asked = (envelope.call_id, envelope.chunk_index, envelope.cache_epoch)
    answered = (result.call_id, result.chunk_index, result.cache_epoch)
    if answered != asked:
        raise OrderError(f"result: got call, chunk, epoch {answered}, want {asked}")
    if result.observed_generator_calls != envelope.expected_generator_calls:
        raise CallCountError(
            f"chunk {envelope.chunk_index}: {result.observed_generator_calls} generator calls, "
            f"planned {envelope.expected_generator_calls}"
        )
