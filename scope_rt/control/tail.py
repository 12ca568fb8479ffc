"""The last latents of a stream: decoder and context are rebuilt from them, bit for bit.

A decoder's own memory can be gigabytes; the latents that it was made from are small, and each is
stored once. How many are needed follows from the codec (`decoder_context_frames`) and the recipe.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scope_rt.control.context import Context
from scope_rt.vae.codec import StreamingDecoder
from scope_rt.watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TailChunk:
    """One chunk's `latents` `[B, F, C, H/8, W/8]`, from latent frame `start_frame` of its epoch.

    `latents_sha256` is of the bytes that the generator ranks agreed on.
    """

    start_frame: int
    latents: Tensor
    latents_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamTail:
    """The newest chunks in order, and the first frames (`sinks`) of the last one's epoch."""

    chunks: tuple[TailChunk, ...] = ()
    sinks: Tensor | None = None

    def followed_by(self, chunk: TailChunk, *, sinks: Tensor) -> "StreamTail":
        """With one chunk more."""
        return StreamTail(chunks=(*self.chunks, chunk), sinks=sinks)

    def trimmed(self, *, num_pending: int, num_frames: int) -> "StreamTail":
        """Without what nobody needs: before the last `num_pending` chunks stay `num_frames` latent
        frames of their epoch."""
        chunks, first = self.chunks, len(self.chunks) - num_pending
        while first > 0 and num_frames > 0 and (not num_pending or chunks[first].start_frame):
            first, num_pending = first - 1, num_pending + 1
            num_frames -= chunks[first].latents.shape[1]
        return replace(self, chunks=chunks[first:])

    def without_newest(self, num_chunks: int) -> "StreamTail":
        """Without the newest chunks; a hard cut follows, which needs no `sinks`."""
        return StreamTail(chunks=self.chunks[: max(0, len(self.chunks) - num_chunks)])

    def before_newest(self, num_frames: int) -> Tensor | None:
        """Latents of the `num_frames` latent frames before the newest chunk, fewer where its epoch
        has fewer; None where there are none."""
        frames, place = [], len(self.chunks) - 1
        while num_frames > 0 and place > 0 and self.chunks[place].start_frame > 0:
            place -= 1
            frames.append(self.chunks[place].latents[:, -num_frames:])
            num_frames -= frames[-1].shape[1]
        return torch.cat(frames[::-1], dim=1) if frames else None

    def replay(
        self, decoder: StreamingDecoder, context: Context, watchdog: Watchdog
    ) -> Iterator[Tensor]:
        """Decode the chunks again: yields the frames, uint8 `[B, T, H, W, 3]`, of each in turn.

        When it is exhausted, `decoder` and `context` are as they were after the last chunk. The
        frames of chunks that are there only to warm up the decoder are not those that were shown.
        """
        decoder.reset()
        context.reset()
        for index, chunk in enumerate(self.chunks):
            if chunk.start_frame == 0:
                decoder.reset()
                context.reset()
            elif index == 0:
                context.resume(num_frames=chunk.start_frame, sinks=self.sinks)
            # Whoever takes long with one chunk is not what is watched.
            with watchdog.section("resuming: decoding"):
                context.remember_latents(chunk.latents)
                frames = decoder.decode(chunk.latents.float())
                context.remember_frames(frames)
            yield frames
