"""Any msgpack, canonical or not, as a tree that can be broken in ways no packer would write.

`parse` takes what it can get; `write` may spell a value longer than it must, repeat a key or leave
a length without its items.
"""

import math
import struct
from dataclasses import dataclass
from random import Random
from typing import Any

import msgpack

Node = Any
"""None, bool, int, float, str, bytes, a list of nodes, `Pairs` or `Raw`."""
Slot = tuple[list[Node], int]
"""A list and a position in it; the key and the value of a pair are positions 0 and 1."""

_MOST_ITEMS = 512
"""Of a list or map: msgpack allocates what a length claims, at every depth."""
_ERRORS = "surrogateescape"
"""Text that is not UTF-8 comes back as the bytes it was."""


@dataclass(slots=True)
class Pairs:
    """A map whose keys may repeat and be of any type; each item is `[key, value]`."""

    items: list[list[Node]]


@dataclass(slots=True)
class Raw:
    """Bytes that are written as they are."""

    data: bytes


def parse(data: bytes) -> Node | None:
    """The tree of one msgpack value; None where there is none, or nothing in it can be changed."""
    try:
        node = msgpack.unpackb(
            data,
            raw=False,
            unicode_errors=_ERRORS,
            strict_map_key=False,
            object_pairs_hook=_pairs,
            ext_hook=_extension,
            max_array_len=_MOST_ITEMS,
            max_map_len=_MOST_ITEMS,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException, RecursionError):
        return None
    return node if isinstance(node, list | Pairs) else None


def slots(root: Node, *, with_keys: bool = True) -> list[Slot]:
    """Every position in a tree that holds a node."""
    found: list[Slot] = []
    left = [root]
    while left:
        node = left.pop()
        first = 1 if isinstance(node, Pairs) and not with_keys else 0
        for items in node.items if isinstance(node, Pairs) else [node]:
            found += [(items, position) for position in range(first, len(items))]
            left += [child for child in items if isinstance(child, list | Pairs)]
    return found


def copy(node: Node) -> Node:
    """A tree that shares no list with `node`; raises `RecursionError` where it is too deep."""
    if isinstance(node, list):
        return [copy(child) for child in node]
    if isinstance(node, Pairs):
        return Pairs([[copy(child) for child in pair] for pair in node.items])
    return node


def write(node: Node, rng: Random, *, longer: float = 0.0) -> bytes:
    """The bytes of a tree; each value takes a longer spelling with probability `longer`.

    Raises `RecursionError` where the tree is too deep.
    """
    if isinstance(node, Raw):
        return node.data
    wide = longer > 0 and rng.random() < longer
    if isinstance(node, list):
        head = _head(len(node), _ARRAY, rng, wide)
        return head + b"".join(write(child, rng, longer=longer) for child in node)
    if isinstance(node, Pairs):
        head = _head(len(node.items), _MAP, rng, wide)
        flat = (child for pair in node.items for child in pair)
        return head + b"".join(write(child, rng, longer=longer) for child in flat)
    if isinstance(node, str):
        text = node.encode(errors=_ERRORS)
        return _head(len(text), _STRING, rng, wide) + text
    if isinstance(node, int) and not isinstance(node, bool):
        return _integer(node, rng, wide)
    if isinstance(node, float) and wide and _fits_float32(node):
        return b"\xca" + struct.pack(">f", node)
    data: bytes = msgpack.packb(node)
    return data


@dataclass(frozen=True, slots=True)
class _Heads:
    """How the length of a kind of value is spelled: in the first byte, or after it."""

    short_code: int
    short_limit: int
    long: tuple[tuple[int, str], ...]


_ARRAY = _Heads(0x90, 16, ((0xDC, ">H"), (0xDD, ">I")))
_MAP = _Heads(0x80, 16, ((0xDE, ">H"), (0xDF, ">I")))
_STRING = _Heads(0xA0, 32, ((0xD9, ">B"), (0xDA, ">H"), (0xDB, ">I")))
_POSITIVE = ((0xCC, ">B"), (0xCD, ">H"), (0xCE, ">I"), (0xCF, ">Q"))
_SIGNED = ((0xD0, ">b"), (0xD1, ">h"), (0xD2, ">i"), (0xD3, ">q"))


def _head(length: int, heads: _Heads, rng: Random, wide: bool) -> bytes:
    if length < heads.short_limit and not wide:
        return bytes([heads.short_code + length])
    fitting = [(c, f) for c, f in heads.long if length < 256 ** struct.calcsize(f)]
    code, form = rng.choice(fitting) if wide else fitting[0]
    return bytes([code]) + struct.pack(form, length)


def _integer(number: int, rng: Random, wide: bool) -> bytes:
    """Out of the 64-bit range, the nearest number in it."""
    number = max(-(2**63), min(number, 2**64 - 1))
    if not wide:
        data: bytes = msgpack.packb(number)
        return data
    forms = [(c, f) for c, f in _POSITIVE if 0 <= number < 256 ** struct.calcsize(f)]
    forms += [(c, f) for c, f in _SIGNED if abs(number) < 256 ** struct.calcsize(f) // 2]
    code, form = rng.choice(forms or [(0xD3, ">q")])
    return bytes([code]) + struct.pack(form, number)


def _fits_float32(number: float) -> bool:
    return not math.isfinite(number) or abs(number) < 3e38


def _pairs(pairs: list[tuple[Node, Node]]) -> Pairs:
    return Pairs([list(pair) for pair in pairs])


def _extension(code: int, data: bytes) -> Raw:
    return Raw(msgpack.packb(msgpack.ExtType(code, data)))
