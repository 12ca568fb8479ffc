"""A viewer that does not read drops for itself alone, and goes on at the next keyframe."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from scope_runners.serve.media.encoder import Encoded

MOST_WAITING = 32
"""Packets of one viewer."""


class Viewer:
    """One reader's queue; fed from any thread, read on its event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        ask_for_key: Callable[[], None],
        leave: Callable[["Viewer"], None],
    ) -> None:
        self.num_dropped = 0
        self._loop, self._ask_for_key, self._leave = loop, ask_for_key, leave
        self._waiting: deque[Encoded] = deque()
        self._changed = asyncio.Event()
        self._needs_key = True
        self._has_begun = False
        self._has_ended = False

    async def next(self) -> Encoded | None:
        """The oldest packet that was not read; None after the last one of an ended stream."""
        while not self._waiting and not self._has_ended:
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft() if self._waiting else None

    def leave(self) -> None:
        """Take no more. Idempotent."""
        self._has_ended = True
        self._waiting.clear()
        self._changed.set()
        self._leave(self)

    def put(self, encoded: Encoded) -> None:
        """From the encoder's thread."""
        self._call(self._put, encoded)

    def end(self) -> None:
        """The stream is over; what waits may still be read. From any thread."""
        self._call(self._end)

    def _call(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody reads
            self._loop.call_soon_threadsafe(call, *arguments)

    def _put(self, encoded: Encoded) -> None:
        if self._has_ended:
            return
        if len(self._waiting) >= MOST_WAITING:
            self.num_dropped += len(self._waiting)
            self._waiting.clear()
            self._needs_key = True
        if self._needs_key and not encoded.is_key:
            self.num_dropped += self._has_begun
            self._ask_for_key()
            return
        self._needs_key, self._has_begun = False, True
        self._waiting.append(encoded)
        self._changed.set()

    def _end(self) -> None:
        self._has_ended = True
        self._changed.set()
