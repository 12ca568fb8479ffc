"""Who listens gets every event in order, or is told that it missed some; nobody who listens slowly
holds up a session."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

Event = Mapping[str, Any]
_MOST_WAITING = 256


class Listener:
    """One client's queue; read on its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue(_MOST_WAITING)
        self._has_missed = False

    async def next(self) -> tuple[Event | None, bool]:
        """The next event, None after the last, and whether some before it were missed."""
        event = await self._queue.get()
        missed, self._has_missed = self._has_missed, False
        return event, missed

    def put(self, event: Event | None) -> None:
        """From any thread; None after the last."""
        try:
            self._loop.call_soon_threadsafe(self._put, event)
        except RuntimeError:  # its loop has ended
            self._has_missed = True

    def _put(self, event: Event | None) -> None:
        if self._queue.full():
            self._queue.get_nowait()
            self._has_missed = True
        self._queue.put_nowait(event)


class EventLog:
    """The events of one session; `seq` rises by one with each, also over restarts of the server."""

    def __init__(
        self, *, first_seq: int = 1, observe: Callable[[Event], None] = lambda event: None
    ) -> None:
        """`observe` is called with each event, in order; it must not block."""
        self._lock = threading.Lock()
        self._next_seq, self._observe = first_seq, observe
        self._listeners: list[Listener] = []
        self._is_closed = False

    @property
    def next_seq(self) -> int:
        """Of the event that comes next."""
        return self._next_seq

    @property
    def num_listeners(self) -> int:
        """That have joined and not left."""
        return len(self._listeners)

    def publish(self, kind: str, **data: Any) -> int:
        """Tell every listener; returns the event's number."""
        with self._lock:
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            event = {"seq": seq, "type": kind, **data}
            for listener in self._listeners:
                listener.put(event)
            self._observe(event)
        return seq

    def join(self, loop: asyncio.AbstractEventLoop) -> Listener:
        """A listener to all that comes from now on."""
        listener = Listener(loop)
        with self._lock:
            self._listeners.append(listener)
            if self._is_closed:
                listener.put(None)
        return listener

    def close(self) -> None:
        """Nothing more happens: let all listeners go."""
        with self._lock:
            self._is_closed = True
            for listener in self._listeners:
                listener.put(None)

    def leave(self, listener: Listener) -> None:
        """It takes no more."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
