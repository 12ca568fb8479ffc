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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO, Protocol

import av

from scope_contracts.errors import UserInputError
from scope_contracts.log_records import Durable, Published, Segment
from scope_rt import output_file
from scope_rt.file_digest import FileDigest, RunningDigest
from scope_rt.file_lock import open_locked
from scope_rt.video.segment_file import SegmentFile

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


class VideoSegments:
    """The hidden files of one video; used by one thread at a time.

    `num_chunks` counts what is whole; any thread may read it.
    """

    def __init__(self, target: Path, ledger: SegmentLedger) -> None:
        """Lock the files of `target`, and change none of them.

        Raises `UserInputError` if `target` cannot be written or has a living writer.
        """
        self.num_chunks = 0
        self._target, self._ledger = target, ledger
        self._joined = self._hidden(f"{token_hex(8)}.partial{target.suffix.lower()}")
        """No other writer has a file of that name: who was given up may still work on its own."""
        with output_file.creating_beside(target, suffixes=CODEC_OF_SUFFIX):
            with suppress(FileNotFoundError):
                self._joined.lstat()  # refuses a name that is too long
            self._lock = _locked(self._path_of(0), target)
        self._parts: dict[int, SegmentFile] = {}
        self._is_given_up = False
        self._next_number = 0
        """Of no segment that the ledger names: what was made again is told from it by that."""
        self._segment: Segment | None = None
        self._digest: RunningDigest | None = None

    def claim_segment(self) -> Path:
        """Where the next segment belongs; FFmpeg hides it from us if its header finds no room.

        Removes videos half joined: a writer that was given up then finds none to publish. Raises
        `OSError`, and `UserInputError` where one cannot be removed.
        """
        self._remove_hidden(r"(\w+\.)?partial\.(mp4|webm)")
        path = self._path_of(self._next_number)
        path.write_bytes(bytes(_MOST_HEADER_BYTES))
        return path

    def load(self, earlier: Iterable[Segment | Durable | Published]) -> None:
        """Take up the whole chunks of earlier writers: what their ledger says, in its order.

        Reads all their packets. Raises `UserInputError` if some are gone or others.
        """
        was_published = False
        try:
            for record in earlier:
                was_published |= isinstance(record, Published)
                if isinstance(record, Segment):
                    path = self._path_of(record.number)
                    self._parts[record.number] = SegmentFile(path, _format(record))
                    self._next_number = record.number + 1
                elif isinstance(record, Durable):
                    self._count(record)
            for part in self._parts.values():
                for _ in part.packets():
                    pass
        except (KeyError, OSError, ValueError, av.FFmpegError) as error:
            why = f"is damaged ({error})"
            if was_published:
                why = (
                    "was finished before its session was closed, and cannot be continued; close a "
                    "session first, as it may retract chunks then, and write what is made again to "
                    "another file"
                )
            raise UserInputError(f"output {self._target}: the video to resume {why}") from error

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
            if part.has_chunks and part.format != _format(segment):
                raise UserInputError(
                    f"output {self._target}: the video to resume is {part.format}, this one is "
                    f"{_format(segment)}"
                )
        self._segment, self._digest = segment, RunningDigest(self._path_of(segment.number))

    def commit_chunk(
        self, chunk_index: int | None, *, num_frames: int, crc32: int, encode_ms: float
    ) -> None:
        """Count a chunk whose packets are all in the segment; None is the one after the last.

        `crc32` is over these packets. Raises `OSError`.
        """
        assert self._segment is not None
        assert self._digest is not None
        number = self._segment.number
        if number not in self._parts:  # a segment without a chunk is not worth a record
            self._parts[number] = SegmentFile(self._path_of(number), _format(self._segment))
            self._next_number = number + 1
            self._ledger.append(self._segment)
        end_bytes = self._path_of(number).stat().st_size
        durable = Durable(
            at_s=time.time(),
            chunk_index=self.num_chunks if chunk_index is None else chunk_index,
            segment=number,
            end_bytes=end_bytes,
            num_frames=num_frames,
            crc32=crc32,
            digest=self._digest.before(end_bytes),
            encode_ms=encode_ms,
        )
        self._ledger.append(durable)
        self._count(durable)

    def publish(self) -> FileDigest:
        """Join the whole chunks under the target's name; the segments stay. Returns what it holds.

        Raises `OSError` or `av.FFmpegError`, leaving the target as it was; so does one that
        was given up.
        """
        parts = [part for part in self._parts.values() if part.has_chunks]
        self._check_wanted()
        try:
            _join(parts, self._joined, fps=Fraction(parts[0].format[3]), check=self._check_wanted)
            digest = FileDigest.of(self._joined)
            # Given up after this, it is there already, and the next writer has removed it.
            self._check_wanted()
            self._joined.replace(self._target)
            return digest
        finally:
            self._joined.unlink(missing_ok=True)

    def give_up_publishing(self) -> None:
        """Let a `publish` that is under way on another thread change nothing any more but the file
        it makes, which has a name of its own."""
        self._is_given_up = True

    def _check_wanted(self) -> None:
        if self._is_given_up:
            raise OSError("nobody waits for the video any more")

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
        self._remove_hidden(r"\d+\.partial\.nut|(\w+\.)?partial\.(mp4|webm)")

    def remove(self) -> None:
        """Leave nothing that can be removed."""
        with suppress(UserInputError):
            self.discard()
        self.release()

    def _remove_hidden(self, endings: str) -> None:
        hidden = re.compile(re.escape(f".{self._target.name}.") + f"({endings})")
        for path in self._target.parent.glob(".*.partial.*"):
            if hidden.fullmatch(path.name) and path != self._path_of(0):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise UserInputError(
                        f"output {self._target}: {path} is in the way ({error.strerror}); remove "
                        "it or choose another name"
                    ) from error

    def _count(self, durable: Durable) -> None:
        self._parts[durable.segment].add(durable)
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


def _join(
    parts: Sequence[SegmentFile], path: Path, *, fps: Fraction, check: Callable[[], None]
) -> None:
    """Copy the packets of all segments into one container, frame n at n / fps. Calls `check` before
    each."""
    # The index in front lets a player start before it has the whole file.
    options = {"movflags": "+faststart"} if path.suffix == ".mp4" else {}
    num_frames = 0
    with av.open(str(path), "w", options=options) as container:
        stream = None
        for part in parts:
            for packet in part.packets():
                check()
                if stream is None:
                    stream = container.add_stream_from_template(packet.stream)
                    stream.time_base = 1 / fps
                packet.stream = stream
                packet.time_base = 1 / fps
                packet.pts = packet.dts = num_frames
                packet.duration = 1
                container.mux(packet)
                num_frames += 1
