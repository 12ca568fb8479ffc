"""Chunks in a row take the room of one: a stream of any length is as large as its cuts are many."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class _Run:
    first: int
    last: int
    number: int


class Runs:
    """Chunk indices in rising order, each with a number: its epoch, or the segment it lies in."""

    def __init__(self, chunks: Iterable[tuple[int, int]] = ()) -> None:
        self._runs: list[_Run] = []
        self._num_chunks = 0
        for index, number in chunks:
            self.add(index, number)

    def __len__(self) -> int:
        return self._num_chunks

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Every chunk's index and number."""
        for run in self._runs:
            for index in range(run.first, run.last + 1):
                yield index, run.number

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """First and last chunk of those in a row with one number, and that."""
        return tuple((run.first, run.last, run.number) for run in self._runs)

    @property
    def first(self) -> tuple[int, int]:
        """Index and number of the first chunk; -1 and -1 where there is none."""
        return (self._runs[0].first, self._runs[0].number) if self._runs else (-1, -1)

    @property
    def last(self) -> tuple[int, int]:
        """Index and number of the last chunk; -1 and -1 where there is none."""
        return (self._runs[-1].last, self._runs[-1].number) if self._runs else (-1, -1)

    def add(self, index: int, number: int) -> None:
        """One chunk more; it takes the place of those from `index` on."""
        self.forget(index)
        self._append(index, index, number)

    def add_span(self, first: int, last: int, number: int) -> None:
        """Chunks in a row, as of `spans`; they take the place of those from `first` on."""
        self.forget(first)
        self._append(first, last, number)

    def forget(self, first: int) -> None:
        """Leave out the chunks from `first` on."""
        while self._runs and self._runs[-1].last >= first:
            run = self._runs.pop()
            self._num_chunks -= run.last - run.first + 1
            if run.first < first:
                self._append(run.first, first - 1, run.number)

    def number_of(self, index: int) -> int | None:
        """The number of a chunk; None where it is not among these."""
        place = bisect_right(self._runs, index, key=lambda run: run.first) - 1
        if place < 0 or index > self._runs[place].last:
            return None
        return self._runs[place].number

    def between(self, first: int, end: int) -> "Runs":
        """Those of chunks `first` to `end` - 1."""
        runs = Runs()
        for run in self._runs:
            from_, to = max(run.first, first), min(run.last, end - 1)
            if from_ <= to:
                runs._append(from_, to, run.number)
        return runs

    def newest(self, num_chunks: int) -> "Runs":
        """The last `num_chunks` of them, or all."""
        runs, skipped = Runs(), self._num_chunks - num_chunks
        for run in self._runs:
            first, skipped = run.first + max(0, skipped), skipped - (run.last - run.first + 1)
            if first <= run.last:
                runs._append(first, run.last, run.number)
        return runs

    def _append(self, first: int, last: int, number: int) -> None:
        self._num_chunks += last - first + 1
        newest = self._runs[-1] if self._runs else None
        if newest is not None and (newest.last + 1, newest.number) == (first, number):
            newest.last = last
        else:
            self._runs.append(_Run(first, last, number))
