"""A JPEG that ends in order may lack data of its picture: Pillow shows the rest in grey, and says
nothing.

A decoder takes what it needs of a scan and skips what is left, so that more bytes at the end of one
change the picture only where some were lacking.
"""

from collections.abc import Iterator
from io import BytesIO

from PIL import Image

_START_OF_SCAN, _END = 0xDA, 0xD9
_NO_MARKER = frozenset({0x00, 0x01, 0xD8})
"""After 0xFF: a scan's own 0xFF, and what says nothing."""
_RESTARTS = range(0xD0, 0xD8)
"""In their order, again and again within a scan."""
_ARITHMETIC = frozenset({0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
"""Frames whose scans may leave out what they end with."""
_MORE = bytes(range(254, 0, -1))
"""No marker, and no picture's data to go on with."""


def lacks_data(data: bytes, image: Image.Image) -> bool:
    """Whether a scan of the JPEG in `data` is shorter than the picture that was decoded of it.

    Raises:
        ValueError, OSError: it is no whole JPEG.
    """
    longer = _with_longer_scans(data)
    if longer is None:
        return False
    with Image.open(BytesIO(longer), formats=["JPEG"]) as other:
        return other.tobytes() != image.tobytes()


def _with_longer_scans(data: bytes) -> bytes | None:
    """The first picture of `data`, with more at the end of each scan and restart; None of an
    arithmetic coder, which may go on with what it finds there.

    Raises:
        ValueError: it ends before its end is marked, or lacks restarts.
    """
    pieces, begun, num_restarts = list[bytes](), 0, 0
    for place, marker, in_scan in _markers(data):
        if marker in _ARITHMETIC:
            return None
        if marker in _RESTARTS:
            if marker != _RESTARTS[num_restarts % len(_RESTARTS)]:
                raise ValueError("a part of it is missing")
            num_restarts += 1
        else:
            num_restarts = 0
        if in_scan:
            pieces += [data[begun:place], _MORE]
            begun = place
        if marker == _END:
            return b"".join([*pieces, data[begun : place + 2]])
    raise ValueError("its end is not marked")


def _markers(data: bytes) -> Iterator[tuple[int, int, bool]]:
    """Place and kind of each marker, and whether a scan's data ends there."""
    place, in_scan = 2, False
    while (place := data.find(b"\xff", place)) >= 0 and place + 1 < len(data):
        marker = data[place + 1]
        if marker == 0xFF:  # fills up
            place += 1
            continue
        if marker in _NO_MARKER:
            place += 2
            continue
        yield place, marker, in_scan
        if marker in _RESTARTS:
            place += 2
            continue
        in_scan = marker == _START_OF_SCAN
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
