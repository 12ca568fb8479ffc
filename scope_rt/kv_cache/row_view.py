"""Reading encoded or scattered rows takes memory beside the cache: counted as the codecs take it.

Planes are read one after another. What was read stays; while the next plane is read, its gathered
parts, its unpacked codes and its numbers in the precision of the work are there as well.
"""

from dataclasses import replace

from scope_contracts.row_format import INT4_GROUP, CodecKind, Plane, RowFormat
from scope_contracts.tensor_spec import DType


def view_bytes(rows: RowFormat, *, is_gathered: bool) -> int:
    """Most bytes a row that a view of one layer takes beside the cache; 0 where it copies nothing.

    `is_gathered`: the rows do not lie in one piece, so they are copied before they are decoded.
    """
    done = most = 0
    for plane in rows.planes:
        stored = replace(rows, planes=(plane,)).bytes_per_row if is_gathered else 0
        if rows.codec is CodecKind.IDENTITY:
            done += stored
            most = done
        else:
            most = max(most, done + stored + plane.heads * _decoding(rows, plane))
            done += plane.heads * plane.dim * rows.dtype.num_bytes
    return most


def _decoding(rows: RowFormat, plane: Plane) -> int:
    """Bytes of one head while it is decoded: worked on, then copied if its dtype is narrower."""
    width = max(rows.dtype.num_bytes, DType.FLOAT32.num_bytes)
    is_packed = rows.codec is CodecKind.INT4
    num_scales = plane.dim // INT4_GROUP if is_packed else 1
    copied = plane.dim * rows.dtype.num_bytes if rows.dtype.num_bytes < width else 0
    unpacked = plane.dim if is_packed else 0
    return unpacked + plane.dim * width + max(copied, num_scales * width)
