"""Every kind of cache streams the embedded model side by side, and is compared with the ring.

Twice, with the same noise for all kinds:

* with a given past: later chunks attend to a true clip of the model's world, the same for all
  kinds, so a difference cannot grow. Motion there has one future, so even the ring has a finite
  distance to the truth, and what a cache costs is the difference of two such distances;
* with its own past: what a viewer would see. There any rounding grows into another stream, which
  may be as good; only whether named things are seen is comparable.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scope_lab.cache_peak import stream_peak_bytes
from scope_lab.kv_bench.result import Effort, Part, Quality, SystemResult
from scope_lab.kv_bench.stopwatch import Stopwatch
from scope_lab.kv_bench.video_streams import (
    EQUAL_BYTES,
    RING,
    Clip,
    Frames,
    Made,
    Streams,
    true_clip,
)
from scope_lab.tiny.verdicts import judge
from scope_lab.tiny.world import CHUNK_FRAMES
from scope_rt.attention.backend import backend_named, default_backend
from scope_rt.collectives import SoloCollectives
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.models.chunk_attention import BlockCausalSelfAttention
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.models.rope import rotations
from scope_rt.session import StreamSession

CACHES = (
    RING,
    "paged",
    "quantized:int8",
    "quantized:fp8",
    "quantized:int4",
    "h2o",
    "h2o:int8",
    "hierarchical",
    EQUAL_BYTES,
)
WARM_UP_CHUNKS = 3
"""The window is full then; what comes before is not compared."""
_CPU = torch.device("cpu")
_TRUTH_SEED = 2**21
"""Clips that neither training nor evaluation draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How much is streamed."""

    num_clips: int
    num_chunks: int
    num_viewed_chunks: int
    """With a stream's own past."""


LENGTHS: Mapping[Effort, Length] = {
    Effort.QUICK: Length(num_clips=1, num_chunks=6, num_viewed_chunks=6),
    Effort.FULL: Length(num_clips=4, num_chunks=16, num_viewed_chunks=80),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What one kind of cache made of one clip's scene."""

    given_past: list[Made]
    own_past: list[Made]


def measure(effort: Effort) -> Part:
    """Stream a few scenes in every kind of cache that can run here."""
    return measure_caches(CACHES, LENGTHS[effort])


def measure_caches(names: Sequence[str], length: Length) -> Part:
    """... in the caches of these names, the ring among them."""
    streams = Streams(names)
    clips = [true_clip(length.num_chunks, seed=_TRUTH_SEED + n) for n in range(length.num_clips)]
    by_name: dict[str, list[Streamed]] = {name: [] for name in streams.sessions}
    recompute, anew_ms = Recompute(streams.sessions[RING]), list[float]()
    for clip in clips:
        given = streams.run(clip.scene, length.num_chunks, given_past=clip.latents)
        own = streams.run(clip.scene, length.num_viewed_chunks)
        for name, made in by_name.items():
            made.append(Streamed(given_past=given[name], own_past=own[name]))
        anew_ms += [recompute.chunk_ms() for _ in range(length.num_chunks)]
    systems = [
        _system(name, by_name, clips, streams.sessions[name], statistics.median(anew_ms))
        for name in by_name
    ]
    systems += [SystemResult(name=name, cannot_run=why) for name, why in streams.refusals.items()]
    streams.close()
    return Part(
        title="Video stream of the embedded model",
        systems=tuple(systems),
        notes=(
            f"{length.num_clips} scenes; {length.num_chunks} chunks with the given true past, "
            f"{length.num_viewed_chunks} with their own; all but the last two hold as many frames",
            "the model was trained on the ring's window: a wider one is new to it",
        ),
    )


class Recompute:
    """A stream without a cache: all that a chunk sees is computed anew at every step."""

    def __init__(self, session: StreamSession) -> None:
        folder, spec = ModelFolder.open(EMBEDDED), session.setup.cache_spec
        self._model = folder.transformer(SoloCollectives(), dtype=torch.float32, device=_CPU)
        cache = open_frame_cache(spec, device=_CPU)
        self._attend = BlockCausalSelfAttention(
            cache=cache,
            window=cache.window(start_frame=0, num_frames=spec.capacity_frames),
            backend=backend_named(default_backend(_CPU, torch.float32)),
            block_tokens=spec.block_frames * spec.frame_tokens,
        )
        self._steps = folder.recipe.timesteps
        side = math.isqrt(spec.frame_tokens)
        self._rope = rotations(
            range(spec.capacity_frames),
            grid=(side, side),
            head_dim=spec.head_dim,
            dtype=torch.complex64,
        )
        channels = folder.config.in_channels
        self._latents = torch.randn(1, spec.capacity_frames, channels, 2 * side, 2 * side)
        text = torch.randn(1, 1, folder.text_encoder().text_len, folder.config.text_dim)
        with torch.inference_mode():
            self._text = self._model.text_kv(text)
            self._modulation = self._model.modulation(torch.full((1, 1), self._steps[0]))

    @torch.inference_mode()
    def chunk_ms(self) -> float:
        """Processor time of the model's calls for one chunk."""
        with Stopwatch() as watch:
            for _ in self._steps:
                self._model(
                    self._latents,
                    modulation=self._modulation,
                    rope=self._rope,
                    text=self._text,
                    attend=self._attend,
                )
        return watch.milliseconds


def _system(
    name: str,
    by_name: Mapping[str, list[Streamed]],
    clips: Sequence[Clip],
    session: StreamSession,
    anew_ms: float,
) -> SystemResult:
    mine, ring = by_name[name], by_name[RING]
    to_ring = _psnr_db(
        (a.chunk.frames, b.chunk.frames)
        for made, reference in zip(mine, ring, strict=True)
        for a, b in list(zip(made.given_past, reference.given_past, strict=True))[WARM_UP_CHUNKS:]
    )
    to_truth, ring_to_truth = _truth_db(mine, clips), _truth_db(ring, clips)
    seen = [
        judge(made.chunk.frames, clip.scene).all_colours
        for streamed, clip in zip(mine, clips, strict=True)
        for made in streamed.own_past
    ]
    equal = [Quality(name="PSNR to ring", value=to_ring, unit="dB")] if to_ring < np.inf else []
    return SystemResult(
        name=name,
        bytes_per_token=session.setup.cache_spec.bytes_per_token,
        peak_bytes=stream_peak_bytes(session.setup.cache_spec),
        throughput_vs_recompute=anew_ms / ms_per_chunk(mine),
        throughput_vs_contiguous=ms_per_chunk(ring) / ms_per_chunk(mine),
        quality=(
            *equal,
            Quality(name="PSNR to truth", value=to_truth, unit="dB"),
            Quality(name="all colours seen", value=100 * statistics.fmean(seen), unit="%"),
        ),
        notes=(
            f"{ms_per_chunk(mine):.1f} ms a chunk; to the truth {to_truth:.3f} dB, "
            f"{to_truth - ring_to_truth:+.3f} against the ring",
            *(() if equal or name == RING else ("the ring's own bits",)),
        ),
    )


def ms_per_chunk(made: Sequence[Streamed]) -> float:
    """Median processor time of the generator alone, once the window is full."""
    return statistics.median(
        each.generate_ms for streamed in made for each in streamed.own_past[WARM_UP_CHUNKS:]
    )


def _truth_db(made: Sequence[Streamed], clips: Sequence[Clip]) -> float:
    return _psnr_db(
        (each.chunk.frames, clip.frames[index * CHUNK_FRAMES : (index + 1) * CHUNK_FRAMES])
        for streamed, clip in zip(made, clips, strict=True)
        for index, each in enumerate(streamed.given_past)
        if index >= WARM_UP_CHUNKS
    )


def _psnr_db(pairs: Iterable[tuple[Frames, Frames]]) -> float:
    """Peak signal-to-noise ratio over all pairs together; infinite for equal ones."""
    error = statistics.fmean(np.square(a.astype(np.float64) - b).mean() for a, b in pairs)
    return float(20 * np.log10(255) - 10 * np.log10(error)) if error else float(np.inf)
