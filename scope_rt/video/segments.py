"""The whole chunks of a video outlive its writer, in order; a chunk cut short never counts.

Until a recording ends, its packets lie beside `stream.mp4`, one file for each writer's life:

    .stream.mp4.0.partial.nut    locked by the one living writer, whatever its own segment
    .stream.mp4.1.partial.nut    of the next life, and so on

Packets go to the operating system first, the record of their chunk to a ledger after them: a chunk
counts from the moment its record is complete. What the ledger does not name is never shown.
"""

import os
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO, Protocol

import av
from av.video.stream import VideoStream

from scope_contracts.errors import UserInputError
from scope_contracts.log_records import Durable, Published, Segment
from scope_rt import output_file
from scope_rt.file_lock import open_locked

_MOST_HEADER_BYTES = 4096
CODEC_OF_SUFFIX = {".mp4": "libx264", ".webm": "libvpx"}


class SegmentLedger(Protocol):
    """Where it is written down what is whole; a stream's log is one."""

    def append(self, record: Segment | Durable | Published) -> None:
        """Add a record; the chunk of a `Durable` counts from then on."""
        ...


class MemoryLedger:
    """What is whole, for as long as this process lives."""

    def __init__(self) -> None:
        self.records: list[Segment | Durable | Published] = []

    def append(self, record: Segment | Durable | Published) -> None:
        """Add a record."""
        self.records.append(record)


class SegmentDamageError(OSError):
    """A segment does not hold what its ledger says; no disk space brings it back."""


@dataclass(slots=True)
class _Part:
    """A file of packets, and the whole chunks in it."""

    path: Path
    format: tuple[str, int, int, str, str]
    chunks: list[Durable] = field(default_factory=list)


class VideoSegments:
    """The hidden files of one video; used by one thread at a time.

    `num_chunks` and `num_frames` count what is whole; any thread may read them.
    """

    def __init__(self, target: Path, ledger: SegmentLedger) -> None:
        """Lock the files of `target`, and change none of them.

        Raises `UserInputError` if `target` cannot be written or has a living writer.
        """
        self.num_chunks = 0
        self.num_frames = 0
        self._target, self._ledger = target, ledger
        with output_file.creating_beside(target, suffixes=CODEC_OF_SUFFIX):
            self._lock = _locked(self._path_of(0), target)
        self._parts: dict[int, _Part] = {}
        self._segment: Segment | None = None

    def claim_segment(self) -> Path:
        """Where the next segment belongs; FFmpeg hides it from us if its header finds no room.

        Raises `OSError`.
        """
        path = self._path_of(self._next_number)
        path.write_bytes(bytes(_MOST_HEADER_BYTES))
        return path

    def load(self, earlier: Sequence[Segment | Durable | Published]) -> None:
        """Take up the whole chunks of earlier writers: what their ledger says, in its order.

        Reads all their packets. Raises `UserInputError` if some are gone or others.
        """
        try:
            for record in earlier:
                if isinstance(record, Segment):
                    path = self._path_of(record.number)
                    self._parts[record.number] = _Part(path, _format(record))
                elif isinstance(record, Durable):
                    self._count(record)
            for part in self._parts.values():
                for _ in _packets(part):
                    pass
        except (KeyError, OSError, ValueError, av.FFmpegError) as error:
            raise UserInputError(
                f"output {self._target}: the video to resume is damaged ({error})"
            ) from error

    def begin_segment(
        self, *, codec: str, width: int, height: int, fps: Fraction, extradata: bytes
    ) -> None:
        """From now on chunks are in the file of `claim_segment`.

        Raises `UserInputError` if it could not be joined to the earlier segments.
        """
        segment = Segment(
            at_s=time.time(),
            number=self._next_number,
            codec=codec,
            width=width,
            height=height,
            fps=str(fps),
            extradata=extradata.hex(),
        )
        for part in self._parts.values():
            if part.chunks and part.format != _format(segment):
                raise UserInputError(
                    f"output {self._target}: the video to resume is {part.format}, this one is "
                    f"{_format(segment)}"
                )
        self._segment = segment

    def commit_chunk(
        self, chunk_index: int | None, *, num_frames: int, crc32: int, encode_ms: float
    ) -> None:
        """Count a chunk whose packets are all in the segment; None is the one after the last.

        `crc32` is over these packets. Raises `OSError`.
        """
        assert self._segment is not None
        number = self._segment.number
        if number not in self._parts:  # a segment without a chunk is not worth a record
            self._parts[number] = _Part(self._path_of(number), _format(self._segment))
            self._ledger.append(self._segment)
        durable = Durable(
            at_s=time.time(),
            chunk_index=self.num_chunks if chunk_index is None else chunk_index,
            segment=number,
            end_bytes=self._path_of(number).stat().st_size,
            num_frames=num_frames,
            crc32=crc32,
            encode_ms=encode_ms,
        )
        self._ledger.append(durable)
        self._count(durable)

    def publish(self) -> None:
        """Join the whole chunks under the target's name; the segments stay.

        Raises `OSError` or `av.FFmpegError`, leaving the target as it was.
        """
        parts = [part for part in self._parts.values() if part.chunks]
        partial = self._hidden(f"partial{self._target.suffix.lower()}")
        try:
            _join(parts, partial, fps=Fraction(parts[0].format[3]))
            partial.replace(self._target)
        finally:
            partial.unlink(missing_ok=True)

    def release(self) -> None:
        """Leave the chunks to a later writer, and no empty file."""
        if os.fstat(self._lock.fileno()).st_size == 0:
            self._path_of(0).unlink(missing_ok=True)
        self._lock.close()

    def discard(self) -> None:
        """Remove every hidden file of the target, whoever left it, but the one that is locked.

        Raises `UserInputError` where one cannot be removed, such as a folder of that name.
        """
        os.ftruncate(self._lock.fileno(), 0)
        self._parts.clear()
        pattern = re.escape(f".{self._target.name}.")
        hidden = re.compile(pattern + r"(\d+\.partial\.nut|partial\.(mp4|webm))")
        for path in self._target.parent.glob(".*.partial.*"):
            if hidden.fullmatch(path.name) and path != self._path_of(0):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise UserInputError(
                        f"output {self._target}: {path} is in the way ({error.strerror}); remove "
                        "it or choose another name"
                    ) from error

    def remove(self) -> None:
        """Leave nothing that can be removed."""
        with suppress(UserInputError):
            self.discard()
        self.release()

    @property
    def _next_number(self) -> int:
        return max(self._parts, default=-1) + 1

    def _count(self, durable: Durable) -> None:
        self._parts[durable.segment].chunks.append(durable)
        self.num_frames += durable.num_frames
        self.num_chunks += 1

    def _path_of(self, number: int) -> Path:
        return self._hidden(f"{number}.partial.nut")

    def _hidden(self, ending: str) -> Path:
        return self._target.with_name(f".{self._target.name}.{ending}")


def _format(segment: Segment) -> tuple[str, int, int, str, str]:
    """What must be equal for segments to be one video."""
    return segment.codec, segment.width, segment.height, segment.fps, segment.extradata


def _locked(path: Path, target: Path) -> BinaryIO:
    """Open `path`, and create it where it is not; the lock ends with the process."""
    try:
        return os.fdopen(open_locked(path), "r+b", buffering=0)
    except BlockingIOError:
        raise UserInputError(
            f"output {target}: another process is writing it; end that one or choose another name"
        ) from None


def _join(parts: Sequence[_Part], path: Path, *, fps: Fraction) -> None:
    """Copy the packets of all segments into one container, frame n at n / fps."""
    # The index in front lets a player start before it has the whole file.
    options = {"movflags": "+faststart"} if path.suffix == ".mp4" else {}
    num_frames = 0
    with av.open(str(path), "w", options=options) as container:
        stream = None
        for part in parts:
            for packet in _packets(part):
                if stream is None:
                    stream = container.add_stream_from_template(packet.stream)
                    stream.time_base = 1 / fps
                packet.stream = stream
                packet.time_base = 1 / fps
                packet.pts = packet.dts = num_frames
                packet.duration = 1
                container.mux(packet)
                num_frames += 1


def _packets(part: _Part) -> "Iterator[av.Packet[VideoStream]]":
    """The packets of the whole chunks; raises `OSError` where they are fewer, or others."""
    if not part.chunks:
        return
    num_bytes, end_bytes = part.path.stat().st_size, part.chunks[-1].end_bytes
    if num_bytes < end_bytes:
        raise SegmentDamageError(f"{part.path}: got {num_bytes} bytes, want {end_bytes} or more")
    with av.open(str(part.path), format="nut") as container:
        packets = (packet for packet in container.demux(video=0) if packet.size)
        for chunk in part.chunks:
            crc32 = 0
            for number in range(chunk.num_frames):
                packet = next(packets, None)
                if packet is None:
                    want = f"{chunk.num_frames} of chunk {chunk.chunk_index}"
                    raise SegmentDamageError(f"{part.path}: got {number} whole frames, want {want}")
                crc32 = zlib.crc32(memoryview(packet), crc32)
                yield packet
            if crc32 != chunk.crc32:
                raise SegmentDamageError(
                    f"{part.path}: the frames of chunk {chunk.chunk_index} are others"
                )
