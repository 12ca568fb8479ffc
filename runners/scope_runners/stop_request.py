"""A person ends a stream with one signal, in order, and with a second one at once.

A signal that was to be ignored when this process was started, as `nohup` or a shell's `&` does, is
ignored: whoever said so wants the stream to go on.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def taking_stop_signals(take: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Meanwhile, `take` is the handler of the signals by which a person stops a program."""
    heeded = [signum for signum in STOPPING if signal.getsignal(signum) is not signal.SIG_IGN]
    handlers = {signum: signal.signal(signum, take) for signum in heeded}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def leave_at_once(signum: int, frame: FrameType | None) -> None:
    """A handler while nothing is written yet: a library that loads may swallow an exception."""
    os.write(sys.stderr.fileno(), b"scope-rt: interrupted\n")
    os._exit(128 + signum)


class Interrupted(KeyboardInterrupt):
    """Like Ctrl-C's, by any of the signals."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.signum = signum


def interrupt(signum: int, frame: FrameType | None) -> None:
    """A handler while a process starts: what it has opened is closed on the way out."""
    raise Interrupted(signum)


class StopRequest:
    """The first signal to stop asks for an end after this chunk, and says so at once, because a
    chunk may take long; the second interrupts it."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def take(self, signum: int, frame: FrameType | None) -> None:
        """The handler, for `taking_stop_signals`."""
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        # No print: the signal may have come in the middle of one.
        with suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), _sentence(signum).encode())


def _sentence(signum: int) -> str:
    after_bar = "\n" if sys.stderr.isatty() else ""
    again = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
    return (
        f"{after_bar}scope-rt: {again}: the video ends after the chunk that is being made; a "
        f"second {again} does not wait for it\n"
    )
