"""A disk that gives no answer for a while; not a test itself."""

import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class StalledDisk:
    """Gives no answer to a `waiting` call while it `stalls`, until it is `back`."""

    def __init__(self) -> None:
        self.stalls, self.back = threading.Event(), threading.Event()

    def waiting(self, call: Callable[P, T]) -> Callable[P, T]:
        """`call`, which begins when the disk answers."""

        def wait(*args: P.args, **kwargs: P.kwargs) -> T:
            if self.stalls.is_set():
                assert self.back.wait(timeout=20), "nobody gave up"
            return call(*args, **kwargs)

        return wait
