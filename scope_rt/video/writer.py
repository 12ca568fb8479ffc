"""Encoding runs beside generation; whole chunks outlive the writer, and a named video is complete.

The caller waits only when the queue is full, and `blocked_s` says how long.
"""

import time
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import av
import numpy as np
from numpy.typing import NDArray

from scope_contracts.errors import IntegrityError, RecordingError, UserInputError
from scope_contracts.log_records import Durable, Published, Segment
from scope_rt.disk import (
    STALL_TIMEOUT_S,
    DaemonExecutor,
    StallError,
    answer,
    remedy,
)
from scope_rt.file_digest import FileDigest
from scope_rt.tensors import crc32_of
from scope_rt.trace import NullTrace, Trace
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.picture_format import check_format, viewable_scale
from scope_rt.video.segment_file import SegmentDamageError
from scope_rt.video.segments import (
    CODEC_OF_SUFFIX,
    MemoryLedger,
    SegmentLedger,
    VideoSegments,
)

_RELEASE_S = 1.0
"""How long a disk that was waited for in vain may take to let go of its files."""
_DISK_ERRORS = (av.FFmpegError, OSError, ValueError)


class VideoWriter:
    """Encodes chunks of frames to H.264 (`.mp4`) or VP8 (`.webm`) on a thread of its own.

    As a context manager it closes on success and, on an exception, aborts or (with
    `keep_on_error`) suspends.
    """

    def __init__(
        self,
        path: Path,
        *,
        width: int,
        height: int,
        fps: Fraction | int,
        scale: int | None = None,
        max_queued_chunks: int = 8,
        trace: Trace | None = None,
        ledger: SegmentLedger | None = None,
        earlier: Iterable[Segment | Durable | Published] = (),
        keep_on_error: bool = False,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        """Prepare `path` for frames of `width` x `height` pixels at `fps` frames per second.

        `scale` repeats every pixel that many times each way; by default enough for the short side
        to reach 256 pixels, so that a person can see a small model's output.
        `ledger` is told of every whole chunk, `earlier` is what writers that died or were suspended
        told it: their chunks come first; without it, what they left is removed. `stall_timeout_s`
        bounds the wait for one chunk, and at the end those for an answer of the disk and for it to
        let go.
        Raises `UserInputError` for a path, size or rate that cannot be recorded, a path that has a
        living writer, and a recording that cannot be resumed; `RecordingError` where the disk takes
        no more of one that can.
        """
        scale = viewable_scale(width, height) if scale is None else scale
        check_format(width, height, fps, scale)
        self.path = path
        self.scale = scale
        self.blocked_s = 0.0
        """Seconds that `write` waited for the encoder because the queue was full."""
        self.encode_ms: list[float] = []
        """Milliseconds of encoding per chunk of this writer, in order."""
        self.num_frames = 0
        """Frames accepted so far by this writer."""
        self.published: FileDigest | None = None
        """What the file under its name holds, once `close` has written it."""
        self._frame_shape = (height, width, 3)
        self._trace: Trace = trace or NullTrace()
        self._max_queued_chunks = max_queued_chunks
        self._stall_timeout_s = stall_timeout_s
        self._keep_on_error = keep_on_error
        self._queued: deque[Future[None]] = deque()
        self._publishing: Future[FileDigest] | None = None
        self._last_index = -1
        """Of the chunks that this writer was given."""
        self._torn = False
        self._ledger = MemoryLedger() if ledger is None else ledger
        self._segments = VideoSegments(path, self._ledger)
        with ExitStack() as on_error:
            on_error.callback(self._segments.release)
            self._segments.load(earlier)
            if not self._segments.num_chunks:
                self._segments.discard()
                on_error.callback(self._segments.discard)
            self.earlier_chunks = self._segments.num_chunks
            """Whole chunks of earlier writers."""
            self._encoder = self._begin_segment(width * scale, height * scale, Fraction(fps))
            on_error.pop_all()
        self._thread = DaemonExecutor("video-writer")
        # Also runs when the interpreter exits without close, suspend or abort.
        self._at_exit = weakref.finalize(
            self,
            _finish_at_exit,
            self._thread,
            self._encoder,
            self._segments,
            keep=keep_on_error,
            timeout_s=stall_timeout_s,
        )
        self._open = True

    @property
    def durable_chunks(self) -> int:
        """Whole chunks that outlive this process, `earlier_chunks` included; for any thread."""
        return self._segments.num_chunks

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more chunks: closed, suspended, or after an error."""
        return not self._open

    def write(
        self,
        frames_THWC: NDArray[np.uint8],
        *,
        chunk_index: int | None = None,
        crc32: int | None = None,
    ) -> None:
        """Queue one chunk of uint8 RGB frames. The array is not copied: it must not change.

        `chunk_index` is what the ledger is told; by default that after the last. `crc32` is of the
        frames as they should be: a chunk that is another when it was encoded is not kept.

        Raises `RecordingError` if an earlier chunk failed, and `IntegrityError` if one had changed
        or this one is not after the last; whole chunks then stay for a resume.
        """
        if (
            frames_THWC.shape[1:] != self._frame_shape
            or len(frames_THWC) == 0
            or frames_THWC.dtype != np.uint8
        ):
            raise ValueError(
                f"frames_THWC: got {frames_THWC.dtype} {frames_THWC.shape}, "
                f"want uint8 (T, {', '.join(map(str, self._frame_shape))}), T > 0"
            )
        if not self._open:
            raise RecordingError(f"{self.path}: recording has ended; open a new writer")
        if chunk_index is not None:
            if chunk_index <= self._last_index:
                raise IntegrityError(
                    f"chunk {chunk_index}: comes to be encoded after chunk {self._last_index}; "
                    "write chunks once, in the order in which they are given"
                )
            self._last_index = chunk_index
        while self._queued and self._queued[0].done():
            self._finish_oldest()
        if len(self._queued) >= self._max_queued_chunks:
            start_s = time.perf_counter()
            self._finish_oldest()
            self.blocked_s += time.perf_counter() - start_s
        self._queued.append(self._thread.submit(self._encode, frames_THWC, chunk_index, crc32))
        self.num_frames += len(frames_THWC)

    def drain(self) -> None:
        """Return when every chunk so far is durable.

        Raises `RecordingError` if one could not be written; whole chunks then stay for a resume.
        """
        while self._queued:
            self._finish_oldest()

    def close(self, *, keep: bool = False) -> None:
        """Finish the file under its name; a video of no frames leaves no file. Idempotent.

        With `keep` the whole chunks stay beside it for a resume; else the ledger is told that the
        video is published.

        Blocks while the video is copied from its segments, and the bound of one wait for a disk
        that gives no answer. Raises `RecordingError` if a chunk or the video could not be written;
        whole chunks then stay for a resume.
        """
        if not self._open:
            return
        self.drain()
        if self.durable_chunks == 0:
            self.abort()
            return
        self._at_exit.detach()  # an interrupt from here on leaves the chunks for a resume
        self._publishing = self._thread.submit(self._publish)
        try:
            # As long as it takes to copy the video, which its size alone bounds.
            timeout_s, thread = self._stall_timeout_s, self._thread
            self.published = video = answer(self._publishing, timeout_s=timeout_s, worker=thread)
        except _DISK_ERRORS as error:
            raise self._failure(error) from error
        if not keep:
            self._ledger.append(
                Published(at_s=time.time(), num_bytes=video.num_bytes, digest=video.blake2b)
            )
        self._end(keep=keep)

    def suspend(self) -> None:
        """Write what is queued and leave the whole chunks for a later resume. Idempotent.

        Raises `RecordingError` if a chunk could not be written.
        """
        if self._open:
            self.drain()
            self._end(keep=True)

    def abort(self) -> None:
        """Stop encoding and leave nothing of this video, earlier writers' chunks included.

        Idempotent, and harmless after the recording has ended.
        """
        if self._open:
            self._end(keep=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif self._keep_on_error:
            with suppress(RecordingError):  # the error that ended the stream is the one to tell
                self.suspend()
        else:
            self.abort()

    def _begin_segment(self, width: int, height: int, fps: Fraction) -> SegmentEncoder:
        codec = CODEC_OF_SUFFIX[self.path.suffix.lower()]
        try:
            encoder = SegmentEncoder(
                self._segments.claim_segment(), codec=codec, width=width, height=height, fps=fps
            )
            self._segments.begin_segment(
                codec=codec, width=width, height=height, fps=fps, extradata=encoder.extradata
            )
        except _DISK_ERRORS as error:
            if self.earlier_chunks:
                raise RecordingError(
                    f"output {self.path}: cannot be continued ({error}), its first "
                    f"{self.earlier_chunks} chunks are kept; {remedy(error)}"
                ) from error
            raise UserInputError(
                f"output {self.path}: cannot be recorded ({error}); "
                "free disk space or choose another output"
            ) from error
        return encoder

    def _encode(
        self, frames_THWC: NDArray[np.uint8], chunk_index: int | None, crc32: int | None
    ) -> None:
        if self._torn:
            return  # behind a chunk that failed, whose own error ends the recording
        start_s = time.perf_counter()
        with self._trace.span("encode", track="encode"):
            self._torn = True
            self._encoder.crc32 = 0
            for frame_HWC in frames_THWC:
                self._encoder.encode(frame_HWC)
            encode_ms = (time.perf_counter() - start_s) * 1e3
            if crc32 is not None and crc32_of(frames_THWC) != crc32:
                raise IntegrityError(
                    f"chunk {chunk_index}: its frames changed while they waited to be encoded; "
                    "who is given a chunk may not change its arrays"
                )
            self._segments.commit_chunk(
                chunk_index,
                num_frames=len(frames_THWC),
                crc32=self._encoder.crc32,
                encode_ms=encode_ms,
            )
            self._torn = False
        self.encode_ms.append(encode_ms)

    def _publish(self) -> FileDigest:
        self._encoder.close()
        return self._segments.publish()

    def _finish_oldest(self) -> None:
        """Wait for the oldest queued chunk; on its failure end the recording."""
        try:
            answer(self._queued[0], timeout_s=self._stall_timeout_s)
        except _DISK_ERRORS as error:
            raise self._failure(error) from error
        except IntegrityError:
            self._end(keep=True)
            raise
        self._queued.popleft()

    def _failure(self, error: Exception) -> RecordingError:
        """End the recording, keeping its whole chunks, and say so in one sentence."""
        self._end(keep=True, patience_s=0.0 if isinstance(error, StallError) else None)
        if isinstance(error, SegmentDamageError):
            return RecordingError(
                f"{self.path}: the video cannot be joined ({error}); its chunks stay in the "
                "hidden files beside it; make it anew under another name"
            )
        kept = (
            f"its first {self.durable_chunks} chunks are kept; {remedy(error)}"
            if self.durable_chunks
            else "no chunk of it is whole; free disk space or choose another output"
        )
        return RecordingError(f"{self.path}: writing the video stopped ({error}), {kept}")

    def _end(self, *, keep: bool, patience_s: float | None = None) -> None:
        """Stop the thread, giving what it does `patience_s`, and let go of the files."""
        self._open = False
        self._at_exit.detach()
        self._thread.cancel()
        self._segments.give_up_publishing()
        calls: list[Future[Any]] = [*self._queued, *filter(None, [self._publishing])]
        running = [call for call in calls if not call.cancelled()]
        patience_s = self._stall_timeout_s if patience_s is None else patience_s
        is_stalled = bool(wait(running, timeout=patience_s).not_done)
        self._queued.clear()
        encoder = None if is_stalled else self._encoder
        disk = DaemonExecutor("video-writer-end") if is_stalled else self._thread
        # The lock ends with the process at the latest, and the next writer removes what is left.
        with self._thread, suppress(StallError):
            released = disk.submit(_release, encoder, self._segments, keep=keep)
            answer(released, timeout_s=_RELEASE_S if is_stalled else self._stall_timeout_s)


def _finish_at_exit(
    thread: DaemonExecutor,
    encoder: SegmentEncoder,
    segments: VideoSegments,
    *,
    keep: bool,
    timeout_s: float,
) -> None:
    """Nobody ended this recording: write what is queued, if it is to be kept, and let go."""
    if not keep:
        thread.cancel()
    thread.submit(_release, encoder, segments, keep=keep)
    thread.settle(timeout_s=timeout_s)


def _release(encoder: SegmentEncoder | None, segments: VideoSegments, *, keep: bool) -> None:
    """Leave the whole chunks to a later writer, or nothing."""
    if encoder is not None:
        with suppress(*_DISK_ERRORS):  # beyond the last whole chunk nothing is needed
            encoder.close()
    if keep and segments.num_chunks:
        segments.release()
    else:
        segments.remove()
