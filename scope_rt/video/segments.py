"""The whole chunks of a video outlive its writer, in order; a chunk cut short never counts.

Until a recording ends, these lie beside `stream.mp4`:

    .stream.mp4.partial.jsonl    the journal, locked by the one living writer
    .stream.mp4.0.partial.nut    the packets of one writer's life; the next life adds `.1.`

Packets are written first, their journal line after them, both straight to the operating system: a
chunk counts from the moment its line is complete. That outlives the process, not a power failure.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from io import FileIO
from itertools import islice
from pathlib import Path

import av
from av.video.stream import VideoStream

from scope_contracts.errors import UserInputError
from scope_rt import output_file

CODEC_OF_SUFFIX = {".mp4": "libx264", ".webm": "libvpx"}


def num_held_chunks(target: Path) -> int:
    """How many whole chunks of `target` lie beside it."""
    journal = _hidden(target, "partial.jsonl")
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    return sum(b'"end_bytes"' in line for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoFormat:
    """What must be equal for segments to be one video; sizes in pixels.

    `extradata` is the encoder's own header, in hexadecimal: a player reads it once for all frames.
    """

    codec: str
    width: int
    height: int
    fps: str
    extradata: str


@dataclass(slots=True, kw_only=True)
class _Segment:
    """One file of packets; what it holds beyond `end_bytes` is no whole chunk."""

    path: Path
    end_bytes: int = 0
    num_frames: int = 0


class SegmentJournal:
    """The hidden files of one video; used by one thread at a time.

    `num_chunks` and `num_frames` count what is whole; any thread may read them.
    """

    def __init__(self, target: Path) -> None:
        """Lock the files of `target`, and change none of them.

        Raises `UserInputError` if `target` cannot be written or has a living writer.
        """
        self.num_chunks = 0
        self.num_frames = 0
        self._target = target
        self._path = _hidden(target, "partial.jsonl")
        with output_file.creating_beside(target, suffixes=CODEC_OF_SUFFIX):
            self._file = _locked(self._path, target)
        self._format: VideoFormat | None = None
        self._segments: list[_Segment] = []

    @property
    def next_segment(self) -> Path:
        """Where the next segment belongs."""
        return _hidden(self._target, f"{len(self._segments)}.partial.nut")

    def load(self) -> None:
        """Take up the whole chunks of earlier writers, and forget what they left unfinished.

        Raises `UserInputError` if the files are damaged.
        """
        content = self._file.readall()
        *lines, torn = content.split(b"\n")
        try:
            for line in lines:
                self._take(line)
            self._check_sizes()
        except (ValueError, TypeError, OSError) as error:
            raise UserInputError(
                f"output {self._target}: the video to resume is damaged ({error})"
            ) from error
        self._file.truncate(len(content) - len(torn))

    def begin_segment(self, video_format: VideoFormat) -> None:
        """From now on chunks are in the file that was `next_segment`.

        Raises `UserInputError` if it could not be joined to the earlier segments.
        """
        if self._format not in (None, video_format):
            raise UserInputError(
                f"output {self._target}: the video to resume is {self._format}, this one is "
                f"{video_format}"
            )
        self._append({"format": asdict(video_format)})
        self._begin(video_format)

    def commit_chunk(self, num_frames: int) -> None:
        """Count a chunk whose packets are all in the segment. Raises `OSError`."""
        end_bytes = self._segments[-1].path.stat().st_size
        self._append({"end_bytes": end_bytes, "num_frames": num_frames})
        self._count(end_bytes, num_frames)

    def publish(self) -> None:
        """Join the whole chunks under the target's name; the segments stay.

        Raises `OSError` or `av.FFmpegError`, leaving the target as it was.
        """
        assert self._format is not None
        partial = _hidden(self._target, f"partial{self._target.suffix.lower()}")
        try:
            _join(self._segments, partial, fps=Fraction(self._format.fps))
            partial.replace(self._target)
        finally:
            partial.unlink(missing_ok=True)

    def release(self) -> None:
        """Leave the chunks to a later writer, and no empty journal."""
        if os.fstat(self._file.fileno()).st_size == 0:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def discard(self) -> None:
        """Remove every hidden file of the target, whoever left it."""
        self._file.truncate(0)  # first, so that no line is left without its segment
        pattern = re.escape(f".{self._target.name}.")
        hidden = re.compile(pattern + r"(\d+\.partial\.nut|partial\.(mp4|webm))")
        for path in self._target.parent.glob(".*.partial.*"):
            if hidden.fullmatch(path.name):
                path.unlink(missing_ok=True)
        self._segments.clear()

    def remove(self) -> None:
        """Leave nothing."""
        self.discard()
        self.release()

    def _take(self, line: bytes) -> None:
        match json.loads(line):
            case {"format": dict(fields)}:
                self._begin(VideoFormat(**fields))
            case {"end_bytes": int(end_bytes), "num_frames": int(num_frames)} if self._segments:
                self._count(end_bytes, num_frames)
            case _:
                raise ValueError(f"journal line {line!r}")

    def _begin(self, video_format: VideoFormat) -> None:
        self._segments.append(_Segment(path=self.next_segment))
        self._format = video_format

    def _count(self, end_bytes: int, num_frames: int) -> None:
        self._segments[-1].end_bytes = end_bytes
        self._segments[-1].num_frames += num_frames
        self.num_frames += num_frames
        self.num_chunks += 1

    def _append(self, entry: dict[str, object]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(f"{self._path}: the disk took only a part of a line")

    def _check_sizes(self) -> None:
        for segment in self._segments:
            num_bytes = segment.path.stat().st_size if segment.num_frames else 0
            if num_bytes < segment.end_bytes:
                raise OSError(
                    f"{segment.path}: got {num_bytes} bytes, want {segment.end_bytes} or more"
                )


def _hidden(target: Path, ending: str) -> Path:
    return target.with_name(f".{target.name}.{ending}")


def _locked(path: Path, target: Path) -> FileIO:
    """Open `path` to read and append; the lock ends with the process, however it ends."""
    while True:
        file = open(path, "a+b", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                file.seek(0)
                return file
        except BlockingIOError:
            file.close()
            raise UserInputError(
                f"output {target}: another process is writing it; "
                "end that one or choose another name"
            ) from None
        except FileNotFoundError:
            pass  # its last owner removed it between our two lines
        file.close()


def _join(segments: list[_Segment], path: Path, *, fps: Fraction) -> None:
    """Copy the packets of all segments into one container, frame n at n / fps."""
    # The index in front lets a player start before it has the whole file.
    options = {"movflags": "+faststart"} if path.suffix == ".mp4" else {}
    num_frames = 0
    with av.open(str(path), "w", options=options) as container:
        stream = None
        for segment in segments:
            for packet in _packets(segment):
                if stream is None:
                    stream = container.add_stream_from_template(packet.stream)
                    stream.time_base = 1 / fps
                packet.stream = stream
                packet.time_base = 1 / fps
                packet.pts = packet.dts = num_frames
                packet.duration = 1
                container.mux(packet)
                num_frames += 1


def _packets(segment: _Segment) -> "Iterator[av.Packet[VideoStream]]":
    """The packets of the whole chunks; raises `OSError` if there are fewer."""
    if segment.num_frames == 0:
        return
    num_packets = 0
    with av.open(str(segment.path), format="nut") as container:
        packets = (packet for packet in container.demux(video=0) if packet.size)
        for packet in islice(packets, segment.num_frames):
            num_packets += 1
            yield packet
    if num_packets < segment.num_frames:
        raise OSError(f"{segment.path}: got {num_packets} whole frames, want {segment.num_frames}")
