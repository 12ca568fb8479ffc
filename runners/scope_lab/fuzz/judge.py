"""An input that breaks the rules is still there afterwards, whatever it did to the process."""

import json
import resource
import sys
import time
import tracemalloc
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from scope_lab.fuzz.targets import ACCEPTED, Target

MOST_SECONDS = 3.0
"""Of processor time, which other processes do not lengthen."""
MOST_PEAK_BYTES = 16 * 2**20
"""What reading one input may allocate; the largest input has 128 KiB."""
MOST_GROWTH_BYTES = 64 * 2**20
"""What the process may grow by over all inputs after the first ones."""
_WARM_UP = 2_000
_TRACED_EVERY = 61
"""Tracing allocations makes an execution several times slower; its time does not count."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """What was run on one target. Times in seconds of the processor, memory in bytes."""

    target: str
    executions: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    worst_s: float = 0.0
    peak_bytes: int = 0
    """The most that one of the traced executions allocated: one in `_TRACED_EVERY`."""
    rss_bytes: int = 0
    rss_growth_bytes: int = 0

    @property
    def accepted(self) -> int:
        return self.verdicts.get(ACCEPTED, 0)

    @property
    def refused(self) -> dict[str, int]:
        """Executions by error class, most first."""
        by_number = sorted(self.verdicts.items(), key=lambda item: -item[1])
        return {name: number for name, number in by_number if name != ACCEPTED}

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


class Judge:
    """Runs inputs on one target and counts; a context manager.

    The input under way lies in `file`, which an exit without an error removes, and nothing else.
    """

    def __init__(
        self, target: Target, file: Path, *, most_growth_bytes: int = MOST_GROWTH_BYTES
    ) -> None:
        self._target, self._path = target, file
        self._most_growth_bytes = most_growth_bytes
        self.figures = Figures(target=target.name)
        self._warm_rss_bytes = 0
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(file, "wb", buffering=0)  # noqa: SIM115

    def judge(self, data: bytes) -> None:
        """Run one input.

        Raises whatever the target raises that is no refusal, and `AssertionError` for an input
        that takes too long or too much.
        """
        self._file.seek(0)
        self._file.write(data)
        self._file.truncate()
        figures = self.figures
        start_s = time.thread_time()
        is_traced = figures.executions % _TRACED_EVERY == 0
        verdict = self._traced(data) if is_traced else self._target.verdict(data)
        elapsed_s = time.thread_time() - start_s
        figures.verdicts[verdict] = figures.verdicts.get(verdict, 0) + 1
        figures.executions += 1
        if not is_traced:
            figures.worst_s = max(figures.worst_s, elapsed_s)
        assert elapsed_s <= MOST_SECONDS, f"{elapsed_s:.2f} s of work on {len(data)} bytes"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *about: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()

    def close(self) -> None:
        """Nothing broke: the last input need not be kept."""
        self._file.close()
        self._path.unlink()

    def _traced(self, data: bytes) -> str:
        """The verdict on an input whose allocations are counted."""
        tracemalloc.start()
        try:
            verdict = self._target.verdict(data)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        figures = self.figures
        figures.peak_bytes = max(figures.peak_bytes, peak_bytes)
        assert peak_bytes <= MOST_PEAK_BYTES, f"{peak_bytes:,} bytes for {len(data)} bytes"
        figures.rss_bytes = _peak_rss_bytes()
        if figures.executions <= _WARM_UP:
            self._warm_rss_bytes = figures.rss_bytes
        figures.rss_growth_bytes = figures.rss_bytes - self._warm_rss_bytes
        grown = figures.rss_growth_bytes
        assert grown <= self._most_growth_bytes, f"the process has grown by {grown:,} bytes"
        return verdict


def _peak_rss_bytes() -> int:
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
