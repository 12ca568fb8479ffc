"""What is read of a segment is what was written: its bytes first, then every packet by itself."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import av
from av.video.stream import VideoStream

from scope_contracts.log_records import Durable
from scope_rt.file_digest import RunningDigest

_ROW = struct.Struct("<QQQQ16s")


class SegmentDamageError(OSError):
    """A segment does not hold what its ledger says; no disk space brings it back."""


@dataclass(slots=True)
class SegmentFile:
    """A file of packets, and the whole chunks in it."""

    path: Path
    format: tuple[str, int, int, str, str]
    _rows: bytearray = field(default_factory=bytearray)
    """Each chunk's index, the byte at which it ends, its frames, CRC-32 and digest."""

    def add(self, chunk: Durable) -> None:
        """One whole chunk more. Raises `ValueError` for a digest that is none."""
        numbers = chunk.chunk_index, chunk.end_bytes, chunk.num_frames, chunk.crc32
        self._rows += _ROW.pack(*numbers, bytes.fromhex(chunk.digest))

    @property
    def has_chunks(self) -> bool:
        """Whether any chunk is whole."""
        return bool(self._rows)

    def packets(self) -> "Iterator[av.Packet[VideoStream]]":
        """Those of the whole chunks, once all bytes before their end were compared.

        Raises:
            SegmentDamageError: bytes or packets are missing, or others than were written.
        """
        if not self.has_chunks:
            return
        self._check_bytes()
        with av.open(str(self.path), format="nut") as container:
            packets = (packet for packet in container.demux(video=0) if packet.size)
            for index, _, num_frames, want_crc32, _ in _ROW.iter_unpack(self._rows):
                crc32 = 0
                for number in range(num_frames):
                    packet = next(packets, None)
                    if packet is None:
                        want = f"{num_frames} of chunk {index}"
                        raise SegmentDamageError(
                            f"{self.path}: got {number} whole frames, want {want}"
                        )
                    crc32 = zlib.crc32(memoryview(packet), crc32)
                    yield packet
                if crc32 != want_crc32:
                    raise SegmentDamageError(
                        f"{self.path}: the frames of chunk {index} are others than were encoded"
                    )

    def _check_bytes(self) -> None:
        num_bytes = self.path.stat().st_size
        digest, start = RunningDigest(self.path), 0
        for index, end_bytes, _, _, want in _ROW.iter_unpack(self._rows):
            if num_bytes < end_bytes:
                raise SegmentDamageError(
                    f"{self.path}: got {num_bytes} bytes, want {end_bytes} or more"
                )
            if digest.before(end_bytes) != want.hex():
                raise SegmentDamageError(
                    f"{self.path}: bytes {start} to {end_bytes}, of chunk {index}, are others than "
                    "were written"
                )
            start = end_bytes
