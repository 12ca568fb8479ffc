"""Rank0 and workers of a stream without a model, to see what they accept; not a test itself."""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from scope_contracts import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    OUTPUT_TENSORS,
    STATE_DIGEST,
    ChunkGeometry,
    DType,
    KVCacheSpec,
    Lifecycle,
    MessageKind,
    PPEnvelope,
    ScalarDigest,
    ScopeError,
    decode_envelope,
    decode_result,
    encode,
    preflight,
)
from scope_contracts.parity import state_hash
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.mesh.peer_check import PeerCheck
from scope_rt.mesh.worker import Worker
from scope_rt.models.generator import ChunkGenerator
from scope_rt.tensors import digest_of, empty
from tests.contracts.stream_rules import BLOCK, MOST_CONTEXT

GEOMETRY = ChunkGeometry(
    latent_channels=4,
    frames_per_block=BLOCK,
    text_len=6,
    text_dim=8,
    dtype=DType.FLOAT32,
    context_frames=MOST_CONTEXT,
)
CACHE = KVCacheSpec(
    num_layers=1,
    num_heads=1,
    head_dim=2,
    frame_tokens=2,
    sink_frames=1,
    window_frames=7,
    batch=1,
    dtype=DType.FLOAT32,
)


class CountingGenerator:
    """Makes as many calls as it is told to and keeps a cache, as a generator does, but no model."""

    def __init__(self) -> None:
        self.cache = open_frame_cache(CACHE, device=torch.device("cpu"))
        self.extra_calls = 0
        self.text_digest = ""
        self._origin = 0

    def generate(
        self, envelope: PPEnvelope, tensors: Mapping[str, Tensor], enter_call: Callable[[], None]
    ) -> Tensor:
        for _ in range(envelope.expected_generator_calls + self.extra_calls):
            enter_call()
        start = envelope.current_start_frame
        if envelope.reset_kv_cache:
            self.cache.reset()
            self._origin = 0
        if envelope.reset_crossattn_cache:
            self.text_digest = digest_of(tensors[CONDITIONING_EMBEDS])
        if envelope.do_kv_recompute:
            frames = tensors[CONTEXT_FRAMES_OVERRIDE].shape[1]
            self.cache.reset()
            self._cache_zeros(start_frame=0, num_frames=frames)
            self._origin = start - frames
        self._cache_zeros(start_frame=start - self._origin, num_frames=BLOCK)
        return torch.zeros(GEOMETRY.latent_shape(envelope.height, envelope.width))

    def _cache_zeros(self, *, start_frame: int, num_frames: int) -> None:
        window = self.cache.window(start_frame=start_frame, num_frames=num_frames)
        rows = torch.zeros(1, window.num_tokens, CACHE.num_heads, CACHE.head_dim)
        self.cache.update(0, window, rows, rows)
        self.cache.advance(window)


def tensors_of(envelope: PPEnvelope) -> dict[str, Tensor]:
    """What travels with `envelope`: every call brings a text of its own, where it brings one."""
    return {spec.name: empty(spec).fill_(envelope.call_id) for spec in envelope.tensors}


class NoPeers:
    """A group of one whose weights never change."""

    def before(self, chunk: int, digest: Callable[[], ScalarDigest]) -> None: ...

    def after(self, chunk: int, elapsed_ms: float, evidence: object) -> None: ...


class WorkerSide:
    """A generator rank, of which only what it accepts and where it stands is looked at."""

    def __init__(
        self, lifecycle: Lifecycle, *, is_remote: bool, geometry: ChunkGeometry = GEOMETRY
    ) -> None:
        self.generator = CountingGenerator()
        self._is_remote = is_remote
        self._worker = Worker(
            generator=cast(ChunkGenerator, self.generator),
            geometry=geometry,
            lifecycle=lifecycle,
            peer_check=cast(PeerCheck, NoPeers()),
        )

    @property
    def lifecycle(self) -> Lifecycle:
        return self._worker._lifecycle

    def take(self, envelope: PPEnvelope) -> bytes | None:
        """What a mesh rank does with the bytes of an envelope, or a rank0 that generates itself.

        Gives the state digest of the chunk, None for a shutdown.
        """
        if self._is_remote:
            envelope = decode_envelope(encode(envelope))
            self._worker.admit(envelope)
        if envelope.kind is MessageKind.SHUTDOWN:
            self._worker.stop(envelope)
            return None
        result, out = self._worker.execute(envelope, tensors_of(envelope))
        result = decode_result(encode(result))
        assert (result.call_id, result.chunk_index, result.cache_epoch) == (
            *(envelope.call_id, envelope.chunk_index, envelope.cache_epoch),
        )
        assert result.observed_generator_calls == envelope.expected_generator_calls
        assert [spec.name for spec in result.tensors] == list(OUTPUT_TENSORS)
        return out[STATE_DIGEST].numpy().tobytes()


class Rank0Side:
    """The planner's rank: every check before a byte leaves, and what it expects to be answered."""

    def __init__(self, lifecycle: Lifecycle, *, geometry: ChunkGeometry = GEOMETRY) -> None:
        self.lifecycle, self._geometry = lifecycle, geometry
        self.extra_calls = 0
        self._text_digest = ""

    def take(self, envelope: PPEnvelope) -> bytes | None:
        preflight(envelope, {spec.name: spec for spec in envelope.tensors}, self._geometry)
        entered = self.lifecycle.enter(envelope)
        if envelope.kind is MessageKind.SHUTDOWN:
            self.lifecycle = entered
            return None
        self.lifecycle = entered.commit(envelope.expected_generator_calls + self.extra_calls)
        if envelope.reset_crossattn_cache:
            self._text_digest = digest_of(tensors_of(envelope)[CONDITIONING_EMBEDS])
        indices = CACHE.indices_at(self.lifecycle.cache_end_frame)
        return state_hash(envelope, indices, conditioning=self._text_digest)


Side = Rank0Side | WorkerSide
Verdict = tuple[type[ScopeError], str] | bytes | None


def verdict_of(side: Side, envelope: PPEnvelope) -> Verdict:
    """The digest of a chunk that ran, or class and sentence of the refusal."""
    try:
        return side.take(envelope)
    except ScopeError as error:
        return type(error), str(error)
