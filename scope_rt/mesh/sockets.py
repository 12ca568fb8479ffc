"""The TCP sockets that a library opened in this process: which they are, and how to end them.

Gloo has no call that ends a wait: `ProcessGroupGloo.abort`, `group.abort()` and
`_abort_process_group` return at once and do nothing to it. Measured with torch 2.13 on two ranks,
one of them stopped by SIGSTOP, the call made from another thread: all_reduce, recv, irecv().wait(),
isend().wait() of 256 MB and monitored_barrier went on for the 24 s that were left of the group's
timeout, and ended within 0.02 s of `shut_down`, with an error that names the connection or the
rank. `tests/mesh/test_sockets.py` repeats it with all_reduce.

A descriptor's number is never trusted alone: a socket counts only while its number still stands for
the very socket it stood for when it was seen. Needs Linux's `/proc`; elsewhere none is ever found.
"""

import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

Address = tuple[str, int]
"""Host and port."""
_NUMBERS = Path("/proc/self/fd")
_TCP = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """A file descriptor and what the kernel says it stands for."""

    number: int
    identity: str

    @classmethod
    def at(cls, number: int) -> Self:
        """Raises OSError when the number is closed."""
        return cls(number, os.readlink(_NUMBERS / str(number)))

    @contextmanager
    def borrowed(self) -> Iterator[socket.socket]:
        """The socket, for a moment. Raises OSError when it is closed."""
        copy = os.dup(self.number)
        try:
            if OpenSocket.at(copy).identity != self.identity:
                raise OSError(f"file descriptor {self.number} stands for something else by now")
            # SOCK_NONBLOCK keeps Python from changing the mode, which both copies share.
            borrowed = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy)
        except OSError:
            os.close(copy)
            raise
        with borrowed:
            yield borrowed


def open_sockets() -> frozenset[OpenSocket]:
    """The TCP sockets of this process."""
    found = set()
    for number in os.listdir(_NUMBERS) if _NUMBERS.is_dir() else ():
        with suppress(OSError):  # closed meanwhile, or not a socket
            candidate = OpenSocket.at(int(number))
            if candidate.identity.startswith("socket:"):
                with candidate.borrowed() as borrowed:
                    if borrowed.family in _TCP:
                        found.add(candidate)
    return frozenset(found)


def connections_to(port: int) -> frozenset[OpenSocket]:
    """Those of them whose other end has the number `port`, on whatever host."""
    found = set()
    for each in open_sockets():
        with suppress(OSError), each.borrowed() as borrowed:
            if borrowed.getpeername()[1] == port:
                found.add(each)
    return frozenset(found)


def local_addresses(sockets: Iterable[OpenSocket]) -> frozenset[Address]:
    """Where this end of each of `sockets` is."""
    addresses = set()
    for each in sockets:
        with suppress(OSError), each.borrowed() as borrowed:
            host, port, *_ = borrowed.getsockname()
            addresses.add((str(host), int(port)))
    return frozenset(addresses)


def shut_down(sockets: Iterable[OpenSocket]) -> None:
    """Shut down `sockets` in both directions: reads and writes on them, here and at the other end,
    fail at once. Listening sockets are left alone: their owner does not expect an end."""
    for each in sockets:
        with suppress(OSError), each.borrowed() as borrowed:
            if not borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                borrowed.shutdown(socket.SHUT_RDWR)


def bound_reads(sockets: Iterable[OpenSocket], *, timeout_s: float) -> None:
    """Let a read on one of `sockets` fail after `timeout_s` without a byte."""
    timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for each in sockets:
        with suppress(OSError), each.borrowed() as borrowed:
            borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
