"""A viewer that does not read loses its own oldest chunks; the stream and the others never notice.

Every viewer sees chunk indices that only rise, and none of an epoch that a hard cut has dropped.
"""

import threading
from collections import deque
from typing import Generic, Protocol, TypeVar


class Emitted(Protocol):
    """What the hub needs to know of a chunk: frames, encoded packets or anything else."""

    @property
    def chunk_index(self) -> int: ...

    @property
    def cache_epoch(self) -> int: ...


T = TypeVar("T", bound=Emitted)


class ViewerHub(Generic[T]):
    """Hands every chunk to every viewer. One lock, held for queue work only, never for a wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._viewers: list[Viewer[T]] = []
        self._first_epoch = 0
        self._last_index = -1
        self._closed = False

    @property
    def num_viewers(self) -> int:
        """Viewers that have joined and not left."""
        return len(self._viewers)

    def join(self, max_chunks: int = 4) -> "Viewer[T]":
        """A new viewer of the chunks from now on, that holds `max_chunks` unread ones at most."""
        if max_chunks < 1:
            raise ValueError(f"max_chunks: got {max_chunks}, want 1 or more")
        with self._lock:
            viewer = Viewer(self, self._lock, max_chunks, ended=self._closed)
            if not self._closed:
                self._viewers.append(viewer)
        return viewer

    def emit(self, chunk: T) -> bool:
        """Queue `chunk` for every viewer; never waits for one.

        False if no viewer may see it: a hard cut dropped its epoch, it or a later chunk was
        emitted before, or the hub is closed.
        """
        with self._lock:
            late = chunk.cache_epoch < self._first_epoch or chunk.chunk_index <= self._last_index
            if late or self._closed:
                return False
            self._last_index = chunk.chunk_index
            for viewer in self._viewers:
                viewer._put(chunk)
        return True

    def cut(self, cache_epoch: int) -> None:
        """A hard cut that drops the past: once this returns, no older epoch is handed out."""
        with self._lock:
            self._first_epoch = max(self._first_epoch, cache_epoch)
            for viewer in self._viewers:
                viewer._forget_before(self._first_epoch)

    def close(self) -> None:
        """End the stream; viewers may still read what they hold. Idempotent."""
        with self._lock:
            self._closed = True
            for viewer in self._viewers:
                viewer._end()
            self._viewers.clear()

    def _remove(self, viewer: "Viewer[T]") -> None:
        with self._lock:
            if viewer in self._viewers:
                self._viewers.remove(viewer)
            viewer._forget_all()
            viewer._end()


class Viewer(Generic[T]):
    """One reader's queue; made by `ViewerHub.join`, read by one thread."""

    def __init__(
        self, hub: ViewerHub[T], lock: threading.Lock, max_chunks: int, *, ended: bool
    ) -> None:
        self.dropped_chunks = 0
        """Chunks lost because this viewer was slow; those of a dropped epoch do not count."""
        self._hub = hub
        self._changed = threading.Condition(lock)
        self._max_chunks = max_chunks
        self._chunks: deque[T] = deque()
        self._ended = ended

    def next(self, timeout_s: float) -> T | None:
        """The oldest chunk not yet read; None after the last one of an ended stream.

        Raises `TimeoutError` if no chunk comes within `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._chunks or self._ended, timeout_s):
                raise TimeoutError(f"viewer: no chunk within {timeout_s:g} s")
            return self._chunks.popleft() if self._chunks else None

    def leave(self) -> None:
        """Take no more chunks and forget those not read. Idempotent."""
        self._hub._remove(self)

    # The hub calls these under the lock that it shares with its viewers.

    def _put(self, chunk: T) -> None:
        if len(self._chunks) == self._max_chunks:
            self._chunks.popleft()
            self.dropped_chunks += 1
        self._chunks.append(chunk)
        self._changed.notify()

    def _forget_before(self, cache_epoch: int) -> None:
        self._chunks = deque(chunk for chunk in self._chunks if chunk.cache_epoch >= cache_epoch)

    def _forget_all(self) -> None:
        self._chunks.clear()

    def _end(self) -> None:
        self._ended = True
        self._changed.notify_all()
