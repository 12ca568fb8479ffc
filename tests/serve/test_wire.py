"""A message is whole, or it ends its connection by name."""

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from scope_contracts.errors import LinkError, UserInputError
from scope_runners.serve.messages import ChunkHeader, Credit, End, Failed, Hello, Message, Role
from scope_runners.serve.wire import MAX_BODY_BYTES, Connection, socket_path

HEADER = ChunkHeader(
    chunk_index=3,
    cache_epoch=1,
    prompt="a",
    num_frames=2,
    height=4,
    width=4,
    crc32=0,
    generator_calls=5,
    recomputed=False,
    bias=1.0,
    cache_fill=0.5,
    latents_sha256="",
    stage_ms=(("plan", 0.5),),
)


Ends = tuple[socket.socket, Connection]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = socket.socketpair()
    connection = Connection(right)
    yield left, connection
    left.close()
    connection.close()


def framed(header: bytes, num_body: int = 0) -> bytes:
    return struct.pack("<IQ", len(header), num_body) + header


@pytest.mark.parametrize(
    ("message", "body"),
    [
        (Hello(role=Role.RANK0, session_id="s", pid=3), b""),
        (Credit(end=7), b""),
        (HEADER, bytes(range(96))),
    ],
)
def test_what_is_sent_is_what_comes(ends: Ends, message: Message, body: bytes) -> None:
    left, right = ends
    sender = threading.Thread(target=Connection(left).send, args=(message, body))
    sender.start()
    assert right.receive() == (message, bytearray(body))
    sender.join(10)


@pytest.mark.parametrize(
    "raw",
    [
        framed(b"\xc1"),
        framed(msgpack.packb(["Credit", {"end": "x"}])),
        framed(msgpack.packb(["Credit", {"end": 1, "more": 2}])),
        framed(msgpack.packb(["None", {}])),
        framed(msgpack.packb(7)),
        framed(msgpack.packb(["Credit", {"end": 1}]), 1) + b"x",
        struct.pack("<IQ", 2**31, 0),
        struct.pack("<IQ", 1, MAX_BODY_BYTES + 1),
        framed(msgpack.packb(["Credit", {"end": 1}]))[:-1],
    ],
)
def test_what_is_no_message_ends_the_connection_by_name(ends: Ends, raw: bytes) -> None:
    left, right = ends
    left.sendall(raw)
    left.close()
    with pytest.raises(LinkError):
        right.receive()


def test_what_a_side_said_last_is_read_after_nothing_can_be_sent_to_it(ends: Ends) -> None:
    left, right = ends
    its, failed = Connection(left), Failed(sentence="the disk is full")
    its.send(failed)
    its.close()
    with pytest.raises(LinkError):
        right.send(End())
    assert right.receive()[0] == failed
    with pytest.raises(LinkError):
        right.receive()


def test_a_side_that_has_left_ends_the_wait(ends: Ends) -> None:
    left, right = ends
    left.close()
    with pytest.raises(LinkError, match="has left"):
        right.receive()
    with pytest.raises(LinkError, match="is gone"):
        for _ in range(3):
            right.send(Credit(end=1))


def test_the_socket_of_a_folder_is_found_again_and_nobody_else_may_enter_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = socket_path(tmp_path / ("x" * 200))
    assert path == socket_path(tmp_path / ("x" * 200))
    assert path != socket_path(tmp_path / "y")
    assert path.parent.stat().st_mode & 0o077 == 0
    path.parent.chmod(0o755)
    with pytest.raises(UserInputError, match="is open to others"):
        socket_path(tmp_path / "y")
