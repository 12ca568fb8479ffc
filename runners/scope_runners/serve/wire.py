"""A message is either whole or it ends its connection: length, length of the body, header, body.

The socket lies in a folder that only this user may enter; what comes through it is still checked.
"""

import contextlib
import hashlib
import os
import socket
import stat
import struct
import tempfile
import threading
from pathlib import Path
from typing import get_args

import msgpack

from scope_contracts.errors import FieldError, LinkError, UserInputError, mismatch
from scope_contracts.plain import PlainRules, from_plain, to_plain
from scope_runners.serve.messages import ChunkHeader, Message, Pictures

MAX_HEADER_BYTES = 2**20
MAX_BODY_BYTES = 2**29
SEND_TIMEOUT_S = 60
"""How long the other side may take to read before it counts as gone."""
_LENGTHS = struct.Struct("<IQ")
_RULES = PlainRules(max_list_length=2**16, max_string_bytes=2**16)
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


class Connection:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        # Of sends alone: the other thread waits for a message as long as it takes.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: Message, body: bytes | memoryview = b"") -> None:
        """Hand over one message whole.

        Blocks until the other side has read enough of what came before, `SEND_TIMEOUT_S` at most.

        Raises:
            LinkError: the connection is gone.
        """
        kind = type(message).__name__
        header = msgpack.packb([kind, to_plain(message, _RULES)])
        with self._sending:
            try:
                self._end.sendall(_LENGTHS.pack(len(header), len(body)) + header)
                if body:
                    self._end.sendall(body)
            except BlockingIOError as error:
                self.close()
                raise LinkError(f"the other side reads nothing for {SEND_TIMEOUT_S} s") from error
            except OSError as error:
                # Half a message may have left; what the other side said last is still to be read.
                with contextlib.suppress(OSError):
                    self._end.shutdown(socket.SHUT_WR)
                raise LinkError(f"the other side of the session is gone ({error})") from error

    def receive(self) -> tuple[Message, bytearray]:
        """The next message and its body; blocks without a bound: whoever ends the connection ends
        the wait.

        Raises:
            LinkError: the connection is gone, or what came is no message.
        """
        num_header, num_body = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
        if num_header > MAX_HEADER_BYTES or num_body > MAX_BODY_BYTES:
            raise LinkError(f"a message of {num_header} + {num_body} bytes is none of ours")
        try:
            kind, plain = msgpack.unpackb(bytes(self._exactly(num_header)))
            message = from_plain(_KINDS[kind], plain, _RULES)
            body = self._exactly(num_body)
            _check_body(message, num_body)
        except (FieldError, KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
            raise LinkError(f"what came is no message of ours ({error})") from error
        return message, body

    def close(self) -> None:
        """End the connection, and every wait on it. Idempotent."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, received = memoryview(data), 0
        while received < num_bytes:
            try:
                count = self._end.recv_into(view[received:], num_bytes - received)
            except OSError as error:
                raise LinkError(f"the other side of the session is gone ({error})") from error
            if not count:
                raise LinkError("the other side of the session has left")
            received += count
        return data


def _check_body(message: Message, num_body: int) -> None:
    want = 0
    if isinstance(message, ChunkHeader | Pictures):
        want = message.num_frames * message.height * message.width * 3
    if num_body != want:
        raise FieldError(mismatch("bytes of the body", got=num_body, want=want))


def socket_path(folder: Path) -> Path:
    """Where the server of `folder` listens: short enough for a socket's name, and found again by
    whoever serves that folder next.

    Raises:
        UserInputError: its folder belongs to somebody else.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    place = base / f"scope-rt-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserInputError(f"{place} is open to others; remove it, and start again")
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
    return place / f"{digest}.sock"


def connect(path: Path) -> Connection:
    """Raises `OSError` where nobody listens."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.connect(str(path))
    except OSError:
        end.close()
        raise
    return Connection(end)
