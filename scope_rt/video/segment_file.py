"""What is read of a segment is what was written: its bytes first, then every packet by itself."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import av
from av.video.stream import VideoStream

from scope_contracts.log_records import Durable
from scope_rt.file_digest import RunningDigest


class SegmentDamageError(OSError):
    """A segment does not hold what its ledger says; no disk space brings it back."""


@dataclass(slots=True)
class SegmentFile:
    """A file of packets, and the whole chunks in it."""

    path: Path
    format: tuple[str, int, int, str, str]
    chunks: list[Durable] = field(default_factory=list)

    def packets(self) -> "Iterator[av.Packet[VideoStream]]":
        """Those of the whole chunks, once all bytes before their end were compared.

        Raises:
            SegmentDamageError: bytes or packets are missing, or others than were written.
        """
        if not self.chunks:
            return
        self._check_bytes()
        with av.open(str(self.path), format="nut") as container:
            packets = (packet for packet in container.demux(video=0) if packet.size)
            for chunk in self.chunks:
                crc32 = 0
                for number in range(chunk.num_frames):
                    packet = next(packets, None)
                    if packet is None:
                        want = f"{chunk.num_frames} of chunk {chunk.chunk_index}"
                        raise SegmentDamageError(
                            f"{self.path}: got {number} whole frames, want {want}"
                        )
                    crc32 = zlib.crc32(memoryview(packet), crc32)
                    yield packet
                if crc32 != chunk.crc32:
                    raise SegmentDamageError(
                        f"{self.path}: the frames of chunk {chunk.chunk_index} are others than "
                        "were encoded"
                    )

    def _check_bytes(self) -> None:
        num_bytes, end_bytes = self.path.stat().st_size, self.chunks[-1].end_bytes
        if num_bytes < end_bytes:
            raise SegmentDamageError(
                f"{self.path}: got {num_bytes} bytes, want {end_bytes} or more"
            )
        digest, start = RunningDigest(self.path), 0
        for chunk in self.chunks:
            if digest.before(chunk.end_bytes) != chunk.digest:
                raise SegmentDamageError(
                    f"{self.path}: bytes {start} to {chunk.end_bytes}, of chunk "
                    f"{chunk.chunk_index}, are others than were written"
                )
            start = chunk.end_bytes
