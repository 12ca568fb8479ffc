"""A disk that never answers holds up no stream for ever, and no exit.

Calls to it run on a daemon thread, which ends with its owner or with its process.
"""

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Calls = SimpleQueue[tuple[Future[Any] | None, Callable[[], Any]] | None]

_IDLE_S = 1.0
STALL_TIMEOUT_S = 60.0
"""How long one answer of a disk is waited for while a stream runs."""
_ANSWER_CPU_S = 0.001
"""A thread that takes less of a core meanwhile was given no answer; the kernel may have asked again
for it."""


class StallError(TimeoutError):
    """A disk gave no answer; the call to it may still be under way."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no answer from the disk for {timeout_s:g} s")
        self.strerror = str(self)


def mend(error: BaseException) -> str:
    """What a person can do about a disk that failed."""
    return "bring the disk back" if isinstance(error, StallError) else "free disk space"


def remedy(error: BaseException) -> str:
    """The same, where the stream that was made can be resumed."""
    return f"{mend(error)}, then resume (--resume; in Python resume=True)"


def answer(future: Future[T], *, timeout_s: float, worker: "DaemonExecutor | None" = None) -> T:
    """What a call to a disk returned.

    Blocks for `timeout_s` at most. With `worker`, on whose thread it is under way, a call of many
    answers may take as long as they come: for `timeout_s` after the last.

    Raises:
        StallError: an `OSError` that says so, after `timeout_s`.
    """
    while True:
        cpu_s = 0.0 if worker is None else worker.cpu_s()
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError:
            if future.done():  # an answer after all, or it is the disk's own error
                return future.result()
            if worker is None or worker.cpu_s() - cpu_s < _ANSWER_CPU_S:
                future.cancel()  # what nobody waits for any more must not begin later
                raise StallError(timeout_s) from None


class DaemonExecutor(Executor):
    """Runs what is submitted in order, on one daemon thread.

    The standard library's pool is joined when the interpreter ends, without a bound.
    """

    def __init__(self, name: str, *, idle: Callable[[], None] | None = None) -> None:
        """`idle` is called on the thread after each second in which nothing was submitted; it
        raises nothing and does not hold what owns this executor."""
        self._calls = _Calls()
        self._pending: set[Future[Any]] = set()
        # The thread must not hold its owner, whose end is its own.
        work = (self._calls, self._pending, idle)
        self._thread = threading.Thread(target=_run, args=work, name=name, daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self._thread.ident)
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call."""
        future: Future[T] = Future()
        self._pending.add(future)
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def post(self, fn: Callable[P, None], /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Queue a call that raises nothing and whose end nobody waits for."""
        self._calls.put((None, partial(fn, *args, **kwargs)))

    def cpu_s(self) -> float:
        """Seconds of a core that its thread has taken: they stand still while that waits for an
        answer, or has ended."""
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # it has ended
            return 0.0

    def cancel(self) -> None:
        """Forget what is queued; what is running goes on."""
        for future in tuple(self._pending):
            future.cancel()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after what is queued; `wait` has nothing to wait for and is ignored."""
        if cancel_futures:
            self.cancel()
        self._calls.put(None)

    def settle(self, *, timeout_s: float) -> None:
        """Give what is queued `timeout_s` to end; its own thread need not wait for itself."""
        if threading.current_thread() is not self._thread:
            wait(tuple(self._pending), timeout=timeout_s)


def _run(calls: _Calls, pending: set[Future[Any]], idle: Callable[[], None] | None) -> None:
    while (item := _next(calls, idle)) is not None:
        future, call = item
        if future is None:
            call()
        else:
            complete(future, call)
            pending.discard(future)
            del future
        del call
        del item  # or the last call and its owner would live until the next one


def _next(
    calls: _Calls, idle: Callable[[], None] | None
) -> tuple[Future[Any] | None, Callable[[], Any]] | None:
    while idle is not None:
        try:
            return calls.get(timeout=_IDLE_S)
        except Empty:
            idle()
    return calls.get()


def complete(future: Future[Any], call: Callable[[], Any]) -> None:
    """Call `call` for who waits for `future`; not where that was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the caller's to see, whatever it is
        future.set_exception(error)
    else:
        future.set_result(result)
