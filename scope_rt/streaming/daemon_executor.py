"""A disk that never answers holds up no exit: the one thread here ends with its process."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonExecutor(Executor):
    """Runs what is submitted in order, on one daemon thread.

    The standard library's pool is joined when the interpreter ends, without a bound.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._futures: list[Future[Any]] = []
        Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call."""
        future: Future[T] = Future()
        self._futures = [each for each in self._futures if not each.done()] + [future]
        self._queue.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after what is queued; `wait` has nothing to wait for and is ignored."""
        if cancel_futures:
            for future in self._futures:
                future.cancel()
        self._queue.put(None)

    def settle(self, *, timeout_s: float) -> None:
        """Give what is queued `timeout_s` to end."""
        wait(self._futures, timeout=timeout_s)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the caller's to see, whatever it is
                future.set_exception(error)
