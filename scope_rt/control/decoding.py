"""Latents become the pictures that a consumer gets, and both are verified on the way."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from scope_rt.control.chunk import Arrived, Chunk
from scope_rt.control.emission import Emission
from scope_rt.control.pipeline import Pipeline
from scope_rt.control.stages import Stages
from scope_rt.control.tail import StreamTail
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.vae.codec import StreamingDecoder


class Decoding:
    """Rank0's decoder, and what is verified of its pictures; `emission` is told of every chunk."""

    def __init__(
        self,
        decoder: StreamingDecoder,
        stages: Stages,
        pipeline: Pipeline,
        *,
        emission: Emission | None,
        instruments: Instruments,
    ) -> None:
        self._decoder, self._stages, self._pipeline = decoder, stages, pipeline
        self._emission, self._instruments = emission, instruments

    def decode(self, arrived: Arrived, tail: StreamTail) -> tuple[Chunk, Tensor]:
        """A chunk that has arrived, with which `tail` ends, and its frames `[B, T, H, W, 3]`.

        Raises:
            IntegrityError: its latents, or its pictures, are not what they must be.
        """
        index, faults = arrived.envelope.chunk_index, self._instruments.faults
        if arrived.envelope.init_cache:
            self._decoder.reset()
        start_ns = time.perf_counter_ns()
        watched = self._instruments.watchdog.section("decoding", chunk=index)
        with self._instruments.trace.span(f"decode {index}", track="decode"), watched:
            decoder = faults.reach(FaultPoint.DECODER, index, self._decoder)
            frames = decoder.decode(arrived.latents.float())
        decoded_ns = time.perf_counter_ns()
        # Afterwards: a decoder may not change them either.
        self._pipeline.check_kept(
            index, "latents at the decoder", arrived.latents, arrived.latents_sha256
        )
        proved_ns = time.perf_counter_ns()
        stage_ms = {
            "decode": (decoded_ns - start_ns) / 1e6,
            "digest": (proved_ns - decoded_ns) / 1e6,
        }
        frames = faults.reach(FaultPoint.DECODED, index, frames)
        return self._chunk(arrived, frames, tail, stage_ms), frames

    def decode_again(self, missing: tuple[Arrived, ...], tail: StreamTail) -> Iterator[Chunk]:
        """After a restart: the `missing` chunks, the last of `tail`; decoder and context are then
        as they were after it."""
        first = len(tail.chunks) - len(missing)
        start_ns = time.perf_counter_ns()
        context, watchdog = self._stages.context, self._instruments.watchdog
        for index, frames in enumerate(tail.replay(self._decoder, context, watchdog)):
            if index >= first:
                stage_ms = {"decode": (time.perf_counter_ns() - start_ns) / 1e6}
                so_far = replace(tail, chunks=tail.chunks[: index + 1])
                yield self._chunk(missing[index - first], frames, so_far, stage_ms)
            start_ns = time.perf_counter_ns()

    def close(self, last_chunk: int) -> None:
        """Verify what is left to verify of the codec; raises `IntegrityError`."""
        if self._stages.pictures is not None:
            with self._instruments.watchdog.section("verifying the codec"):
                self._stages.pictures.close(last_chunk)

    def _chunk(
        self, arrived: Arrived, frames: Tensor, tail: StreamTail, stage_ms: dict[str, float]
    ) -> Chunk:
        pictures, crc32 = self._stages.pictures, None
        if pictures is not None:
            before = partial(tail.before_newest, pictures.num_frames_before)
            index = arrived.envelope.chunk_index
            with self._instruments.watchdog.section("verifying its picture", chunk=index):
                crc32 = pictures.verify(index, arrived.latents, frames, before=before)
        chunk = arrived.shown(frames, stage_ms=stage_ms, crc32=crc32)
        if self._emission is not None:
            self._emission.decoded(chunk)
        return chunk
