"""What this process is in the middle of ends within its bound, or somebody is told.

A thread looks at what the computing thread is in, for what that one cannot leave by itself: a
kernel, a decode, a wait that nothing ends. Time in which this process did not run does not count.
A thread that holds Python's own lock holds this one up too; PyTorch's calls let go of it. What
takes twice as long as the last of its kind is told while it lasts, and what is slow at least every
minute: neither a slow start nor a slow stream is a silent one.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from scope_contracts.errors import ChunkTimeoutError, ScopeError

LOOKS_PER_BOUND = 10
_LONGEST_LOOK_S = 1.0
_SLOW_S = 10.0
"""Before which nothing is told to take long; after it is told, again after twice as long."""
_LONGEST_SILENCE_S = 60.0
"""After which what takes longer than `_SLOW_S` is told, however long the last of its kind took."""
_PAUSE_LOOKS = 2
"""A look that came so many looks late comes after a pause of this process."""
_LOG = logging.getLogger(__name__)


def log_stuck(error: ScopeError) -> None:
    """What a library does by default: the process is not its own to end."""
    _LOG.error("%s: %s", type(error).__name__, error)


@dataclass(slots=True, eq=False, kw_only=True)
class _Section:
    """What the computing thread is in."""

    kind: str
    what: str
    """With its chunk."""
    bound_s: float
    slow_s: float
    """When it is told next that this takes long."""
    ends_with_group: bool
    all_open: "list[_Section]"
    lasted_s: dict[str, float]
    """The last one of each kind."""
    spent_s: float = 0.0
    after_failure_s: float = 0.0
    is_told: bool = False

    def __enter__(self) -> None:
        self.all_open.append(self)

    def __exit__(self, *error: object) -> None:
        self.all_open.remove(self)
        if self.slow_s < math.inf:
            self.lasted_s[self.kind] = self.spent_s


class Watchdog:
    """Of one process; `on_stuck` is called, on the watchdog's thread, once for each time that the
    computing thread does not come out of something.

    It may end the process; by default it is logged.
    """

    def __init__(self, on_stuck: Callable[[ScopeError], None] = log_stuck) -> None:
        self._on_stuck = on_stuck
        self._sections: list[_Section] = []
        self._chunk_s = self._grace_s = math.inf
        self._failure: ScopeError | None = None
        self._lasted_s: dict[str, float] = {}
        self._silent_s = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.tell_others: Callable[[ScopeError], object] | None = None
        """Called before `on_stuck` with what other ranks do not know yet."""

    def start(self, *, chunk_s: float, grace_s: float) -> None:
        """Start the thread; returns at once.

        `chunk_s` bounds what is bounded; `grace_s` is how long a thread may stay in what needs
        other ranks once their group has failed. Both are exceeded by `_LONGEST_LOOK_S` at most.
        """
        self.stop()
        self._chunk_s, self._grace_s, self._failure = chunk_s, grace_s, None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name="watchdog", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end; nothing is told any more. Idempotent, returns at once."""
        self._stop.set()
        self.tell_others = None

    def group_failed(self, error: ScopeError) -> None:
        """Other ranks are lost: what needs them has `grace_s` from now on."""
        self._failure = self._failure or error

    def section(
        self,
        what: str,
        *,
        chunk: int | None = None,
        is_bounded: bool = True,
        is_wait: bool = False,
        ends_with_group: bool = False,
    ) -> AbstractContextManager[None]:
        """The computing thread is in `what`, of a chunk or of none, and may be stuck there.

        Args:
            is_bounded: it ends within `chunk_s`; else it has no bound here.
            is_wait: it waits for another rank, and may do so for as long as it is not bounded.
            ends_with_group: it needs other ranks, and cannot succeed without them.
        """
        slow_s = max(_SLOW_S, 2 * self._lasted_s.get(what, 0.0))
        return _Section(
            kind=what,
            what=what if chunk is None else f"chunk {chunk}: {what}",
            bound_s=self._chunk_s if is_bounded else math.inf,
            slow_s=math.inf if is_wait else slow_s,
            ends_with_group=ends_with_group,
            all_open=self._sections,
            lasted_s=self._lasted_s,
        )

    def look(self, elapsed_s: float) -> None:
        """Count `elapsed_s` for what the computing thread is in, and tell what is stuck."""
        failure = self._failure
        self._silent_s += elapsed_s
        for section in tuple(self._sections):
            section.spent_s += elapsed_s
            if failure is not None and section.ends_with_group:
                section.after_failure_s += elapsed_s
            if section.is_told:
                continue
            slow_s = _SLOW_S if self._silent_s >= _LONGEST_SILENCE_S else section.slow_s
            if section.spent_s >= slow_s and section.slow_s < math.inf:
                section.slow_s, self._silent_s = 2 * section.spent_s, 0.0
                _LOG.warning("%s has taken %.0f s so far", section.what, section.spent_s)
            if failure is not None and section.after_failure_s >= self._grace_s:
                section.is_told = True
                self._on_stuck(_unended(section.what, failure, self._grace_s))
            elif section.spent_s >= section.bound_s:
                section.is_told = True
                late = _late(section.what, section.bound_s)
                if (tell_others := self.tell_others) is not None:  # `stop` may come meanwhile
                    tell_others(late)
                self._on_stuck(late)

    def _run(self, stop: threading.Event) -> None:
        shortest_s = min(self._chunk_s, self._grace_s)
        look_s = min(_LONGEST_LOOK_S, shortest_s / LOOKS_PER_BOUND)
        before_s = time.monotonic()
        while not stop.wait(look_s):
            now_s = time.monotonic()
            elapsed_s, before_s = now_s - before_s, now_s
            self.look(elapsed_s if elapsed_s < _PAUSE_LOOKS * look_s else look_s)


def _late(what: str, bound_s: float) -> ChunkTimeoutError:
    return ChunkTimeoutError(
        f"{what} did not end within {bound_s:g} s; a kernel or the device hangs, or this takes "
        "longer: then raise start_timeout_s (SCOPE_START_TIMEOUT_S)"
    )


def _unended(what: str, failure: ScopeError, grace_s: float) -> ScopeError:
    return type(failure)(f"{what}: {failure.args[0]}; it did not end within {grace_s:g} s of that")
