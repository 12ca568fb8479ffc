"""A PNG that ends in order may have fewer rows than its header says: Pillow leaves those black, and
says nothing.

Chunks, channels and passes are those of the PNG specification (W3C, third edition).
"""

import struct
import zlib
from collections.abc import Iterator

_FIRST_CHUNK = 8
_CHUNK = struct.Struct(">I4s")
_HEADER = struct.Struct(">IIBB2xB")
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_WHOLE = ((0, 0, 1, 1),)
_ADAM7 = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
    *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)
"""First column and row of each pass, and the steps to the next."""
_MOST_AT_ONCE = 2**20


def lacks_rows(data: bytes) -> bool:
    """Whether the PNG in `data`, of which a reader has found no fault, has too few bytes of pixels.

    Raises:
        zlib.error, struct.error, KeyError: it is no whole PNG.
    """
    width, height, depth, colour, interlace = _HEADER.unpack_from(data, _FIRST_CHUNK + _CHUNK.size)
    want = 0
    for left, top, right, down in _ADAM7 if interlace else _WHOLE:
        columns, rows = -((left - width) // right), -((top - height) // down)
        if columns > 0 and rows > 0:
            want += rows * (1 + -(-columns * depth * _CHANNELS[colour] // 8))
    for length in _lengths(data):
        want -= length
        if want <= 0:  # a small picture may have gigabytes behind its last row
            return False
    return True


def _lengths(data: bytes) -> Iterator[int]:
    """Of the decompressed pieces, none of them kept."""
    stream, at = zlib.decompressobj(), _FIRST_CHUNK
    while at + _CHUNK.size <= len(data):
        length, kind = _CHUNK.unpack_from(data, at)
        piece = data[at + _CHUNK.size : at + _CHUNK.size + length] if kind == b"IDAT" else b""
        while piece and not stream.eof:
            yield len(stream.decompress(piece, _MOST_AT_ONCE))
            piece = stream.unconsumed_tail
        at += _CHUNK.size + length + 4
    yield len(stream.flush())
