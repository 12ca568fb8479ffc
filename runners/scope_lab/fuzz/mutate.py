"""A mutation keeps most of a message, so that what is wrong lies behind the first check.

Everything is a pure function of the bytes given and the random source.

Why these mutations are not strategies of hypothesis, tried side by side on `envelope` for 30 s on
one busy core, with eleven kinds of input to be met (a key twice, text that is no UTF-8, lists 1024
deep, an integer written longer than needed, ...):

| engine                                     | inputs | kinds met | all of them after |
|--------------------------------------------|-------:|----------:|------------------:|
| these mutations                            | 96,735 |        11 |             0.2 s |
| the same, every random choice hypothesis's | 11,400 |        11 |             4.5 s |
| hypothesis's own values put into messages  | 12,600 |         6 |                 - |

A packer writes canonical messages only, so a strategy of values never meets bytes that no packer
writes; and what decides here is the number of inputs. Hypothesis shrinks what it found to one
changed field, where an input found here has mostly one or two changes to begin with.
"""

import struct
import zlib
from collections.abc import Callable
from random import Random

from scope_contracts.log_file import MAGIC
from scope_contracts.wire import MAX_MESSAGE_BYTES
from scope_lab.fuzz.loose_msgpack import Node, Pairs, Raw, Slot, copy, parse, slots, write

Mutation = Callable[[bytes, Random], bytes]
_Change = Callable[[Node, Random, tuple[bytes, ...]], None]

MOST_BYTES = 2 * MAX_MESSAGE_BYTES
_FRAME = struct.Struct("<II")
_LENGTHS = (0, 1, 7, 255, 256, 65_535, 65_536, 65_537, 2**28, 2**28 + 1, 2**31, 2**32 - 1)
_INTEGERS = (
    *(0, 1, 2, 3, 5, 15, 16, 63, 64, 127, 128, 255, 256, 65_535, 65_536),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1),
    *(-1, -3, -32, -33, -128, -129, -32_769, -(2**31) - 1, -(2**63)),
)
_FLOATS = (0.0, -0.0, 0.3, 1.0, -1.0, 625.0, 1000.0, 1000.0000001, 5e-324, 1.7e308)
_NOT_FINITE = (float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "\x00", "infer", "pp1", "float8", "é" * 128, "x" * 256, "x" * 257, "\udc80")
_DEPTHS = (1, 2, 30, 300, 900, 1_000, 1_022, 1_023, 1_024, 5_000, 30_000)
_CLAIMS = (1, 255, 256, 257, 1_024, 3_000, 20_000, 60_000)
_RAW = (
    *(b"\xc0", b"\xc1", b"\xc4\x01a", b"\xd4\x05a", b"\xd6\xff\x00\x00\x00\x01"),
    *(b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"),
    *(
        b"\xda\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ),
    *(b"\xca\x7f\xc0\x00\x00", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x01", b"\xcb\x80" + bytes(7)),
    *(b"\xd7\xff" + b"\xff" * 8, b"\xc7\x0c\xff" + b"\xff" * 12, b"\xa2\xc3\x28", b"\x81\xa1a"),
)


def message_mutation(donors: tuple[bytes, ...]) -> Mutation:
    """Mutate one msgpack message, with parts of `donors`."""

    def mutate(data: bytes, rng: Random) -> bytes:
        depth = rng.random()
        if depth < 0.15:
            return mutate_bytes(data, rng, donors)
        change = _nudge if depth < 0.6 else _mutate_node
        return _mutate_tree(data, rng, donors, change)

    return mutate


def recording_mutation(donors: tuple[bytes, ...]) -> Mutation:
    """Mutate a file of frames; most of them get the checksum of what they then hold."""
    bodies = tuple(body for donor in donors for body in split_frames(donor)[0])
    of_message = message_mutation(bodies)

    def mutate(data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.1:
            return mutate_bytes(data, rng, donors)
        frames, tail = split_frames(data)
        for _ in range(_few(rng)):
            _mutate_frames(frames, rng, bodies, of_message)
        whole = MAGIC + b"".join(_framed(frame, rng) for frame in frames) + tail
        return _damaged_end(whole, rng)[:MOST_BYTES]

    return mutate


def split_frames(data: bytes) -> tuple[list[bytes], bytes]:
    """What the frames of a recording hold, as far as they go, and the bytes after them."""
    bodies: list[bytes] = []
    at = len(MAGIC)
    while at + _FRAME.size <= len(data):
        length, _ = _FRAME.unpack_from(data, at)
        if at + _FRAME.size + length > len(data):
            break
        at += _FRAME.size
        bodies.append(data[at : at + length])
        at += length
    return bodies, data[at:]


def mutate_bytes(data: bytes, rng: Random, donors: tuple[bytes, ...]) -> bytes:
    """Change bytes without a thought for what they mean."""
    for _ in range(_few(rng)):
        data = rng.choice(_ON_BYTES)(data, rng, donors)
    return data[:MOST_BYTES]


def _flip_bit(data: bytes, rng: Random, donors: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return (
        data[:at]
        + bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + 1])
        + data[at + 1 :]
    )


def _overwrite(data: bytes, rng: Random, donors: tuple[bytes, ...]) -> bytes:
    at, new = rng.randrange(len(data) + 1), rng.choice((rng.randbytes(1), rng.choice(_RAW)))
    return data[:at] + new + data[at + len(new) :]


def _insert(data: bytes, rng: Random, donors: tuple[bytes, ...]) -> bytes:
    at, new = rng.randrange(len(data) + 1), rng.choice((rng.randbytes(3), rng.choice(_RAW)))
    return data[:at] + new + data[at:]


def _truncate(data: bytes, rng: Random, donors: tuple[bytes, ...]) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _cut_out(data: bytes, rng: Random, donors: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.randrange(1, 17) :]


def _repeat(data: bytes, rng: Random, donors: tuple[bytes, ...]) -> bytes:
    at = rng.randrange(len(data) + 1)
    part = data[at : at + rng.randrange(1, 65)]
    return data[:at] + part * rng.choice((2, 3, 40)) + data[at:]


def _splice(data: bytes, rng: Random, donors: tuple[bytes, ...]) -> bytes:
    other = rng.choice(donors)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


_ON_BYTES = (_flip_bit, _flip_bit, _overwrite, _insert, _truncate, _cut_out, _repeat, _splice)


def _mutate_tree(data: bytes, rng: Random, donors: tuple[bytes, ...], change: _Change) -> bytes:
    tree = parse(data)
    if tree is None:
        return mutate_bytes(data, rng, donors)
    try:
        for _ in range(_few(rng)):
            change(tree, rng, donors)
        longer = rng.choice((0.02, 0.5)) if rng.random() < 0.1 else 0.0
        return write(tree, rng, longer=longer)[:MOST_BYTES]
    except RecursionError:
        return mutate_bytes(data, rng, donors)


def _nudge(tree: Node, rng: Random, donors: tuple[bytes, ...]) -> None:
    """Give one value another value of its type."""
    if values := slots(tree, with_keys=False):
        items, at = rng.choice(values)
        items[at] = _nudged(items[at], rng)


def _mutate_node(tree: Node, rng: Random, donors: tuple[bytes, ...]) -> None:
    places = slots(tree)
    if not places:
        return
    items, at = slot = rng.choice(places)
    choice = rng.randrange(11)
    if choice < 3:
        items[at] = _nudged(items[at], rng)
    elif choice < 5:
        items[at] = _unlike(rng)
    elif choice < 7:
        _graft(slot, rng, donors)
    elif choice == 7:
        others, there = rng.choice(places)
        items[at], others[there] = copy(others[there]), copy(items[at])
    elif choice == 8:
        _change_length(tree if rng.random() < 0.5 else items[at], rng)
    elif choice == 9:
        rng.shuffle(tree.items if isinstance(tree, Pairs) else tree)
    else:
        items[at] = _deep(rng)


def _deep(rng: Random) -> Raw:
    """Lists in lists or maps in maps, which may claim more items than there are bytes."""
    claim = struct.pack(">H", rng.choice(_CLAIMS))
    opening = rng.choice((b"\x91", b"\x81\xa1a", b"\xdc" + claim, b"\xde" + claim + b"\xa1a"))
    items = bytes(60_000) if rng.random() < 0.1 else b""
    return Raw(opening * rng.choice(_DEPTHS) + items)


def _nudged(node: Node, rng: Random) -> Node:
    """Another value of the same type, mostly near."""
    if isinstance(node, bool):
        return not node
    if isinstance(node, int):
        return rng.choice((node + 1, node - 1, node + 3, -node, rng.choice(_INTEGERS)))
    if isinstance(node, float):
        return rng.choice((node / 2, -node, node + 1e-9, rng.choice(_FLOATS)))
    if isinstance(node, str):
        return rng.choice((node + "x", node[:-1], node.upper(), rng.choice(_TEXTS)))
    if isinstance(node, list):
        return node * rng.choice((0, 2, 3, 300 // (len(node) + 1)))
    return node


def _unlike(rng: Random) -> Node:
    """Any value at all."""
    return rng.choice(
        (
            rng.choice(_INTEGERS),
            rng.choice(_FLOATS + _NOT_FINITE),
            rng.choice(_TEXTS),
            rng.choice((None, True, False, [], Pairs([]), b"a")),
            Raw(rng.choice(_RAW)),
            Raw(b"\xdb\x00\x00\xea\x60" + b"x" * 60_000) if rng.random() < 0.05 else 1,
        )
    )


def _graft(slot: Slot, rng: Random, donors: tuple[bytes, ...]) -> None:
    """Put what a donor has in some place, key or value, into this one."""
    donor = parse(rng.choice(donors))
    if donor is not None:
        there, position = rng.choice(slots(donor))
        items, at = slot
        items[at] = there[position]


def _change_length(node: Node, rng: Random) -> None:
    items = node.items if isinstance(node, Pairs) else node if isinstance(node, list) else []
    if items:
        at = rng.randrange(len(items))
        if rng.random() < 0.5:
            del items[at]
        else:
            items.insert(rng.randrange(len(items) + 1), copy(items[at]))


def _mutate_frames(
    frames: list[bytes], rng: Random, donors: tuple[bytes, ...], of_message: Mutation
) -> None:
    if not frames:
        frames.append(rng.choice(donors))
    at = rng.randrange(len(frames))
    choice = rng.randrange(10)
    if choice < 5:
        frames[at] = of_message(frames[at], rng)
    elif choice == 5:
        frames[at] += rng.choice((b"\x00", bytes(40), b"x"))
    elif choice == 6:
        del frames[at]
    elif choice == 7:
        frames.insert(rng.randrange(len(frames) + 1), frames[at])
    elif choice == 8:
        frames.insert(at, rng.choice(donors))
    else:
        rng.shuffle(frames)


def _framed(body: bytes, rng: Random) -> bytes:
    length, checksum = len(body), zlib.crc32(body)
    if rng.random() < 0.02:
        length = rng.choice((length - 1 & 0xFFFFFFFF, length + 1, rng.choice(_LENGTHS)))
    if rng.random() < 0.02:
        checksum ^= 1 << rng.randrange(32)
    return _FRAME.pack(length, checksum) + body


def _damaged_end(data: bytes, rng: Random) -> bytes:
    """What a crash may leave of a file, or leave behind it."""
    if rng.random() < 0.7:
        return data
    torn = data[: rng.randrange(len(data) + 1)] if rng.random() < 0.5 else data
    return torn + rng.choice((b"", b"", bytes(rng.randrange(200)), rng.randbytes(20)))


def _few(rng: Random) -> int:
    """1, seldom many: a message that is wrong in one place only tests that place."""
    count = 1
    while count < 12 and rng.random() < 0.35:
        count += 1
    return count
