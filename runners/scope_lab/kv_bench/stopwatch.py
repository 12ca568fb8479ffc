"""Processor time, so that other work on the machine counts in no figure.

All threads of the process count. One computes, unless `--threads` says more; what several spend is
more than the time that passed, so their figures do not compare with those of one.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median


class Stopwatch:
    """`with Stopwatch() as watch: ...` leaves `watch.seconds` of this process, all threads."""

    def __enter__(self) -> "Stopwatch":
        self.seconds = 0.0
        self._start = time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.process_time() - self._start

    @property
    def milliseconds(self) -> float:
        return 1e3 * self.seconds


def step_seconds(step: Callable[[], object], count: int) -> float:
    """Of one of `count` steps."""
    with Stopwatch() as watch:
        for _ in range(count):
            step()
    return watch.seconds / count


def median_ratio(theirs: Sequence[float], mine: Sequence[float]) -> float:
    """How many times faster `mine` are, round by round."""
    return median(a / b for a, b in zip(theirs, mine, strict=True))
