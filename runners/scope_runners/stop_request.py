"""A person ends a stream with one signal, in order, and with a second one at once."""

import signal
from types import FrameType
from typing import Self


class StopRequest:
    """The first signal to stop asks for an end after this chunk, the second interrupts it."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __enter__(self) -> Self:
        self._handlers = {
            signum: signal.signal(signum, self._take)
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        return self

    def __exit__(self, *reason: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
