"""Every rank counts up in the shared store and watches the others; all report the same failure.

A thread of each rank writes its own count, over a store connection of its own, sealed: no other
process can beat for a rank, nor report a failure. A rank whose count does not rise is lost, and so
is a store that does not answer; both are named within the bound, so silence is noticed somewhat
earlier. The rank that detects a failure, or leaves because of its own, writes it to the store
before it acts: the first one written is what all ranks report. Every thread looks for it with each
beat, and aborts the process groups then, which ends the main thread's waits. Time in which this
process itself did not run does not count as silence of others, and no rank is named after a single
look.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public by its documentation

from scope_contracts.errors import LinkError, LinkTimeoutError, PeerLostError
from scope_rt.mesh.authentic import SealedStore
from scope_rt.mesh.rendezvous import Meeting, named
from scope_rt.mesh.reported import NO_CHUNK, Failure, GroupError, reported_error

BEATS_PER_BOUND = 20
_PATIENCE = 0.8
"""Share of the bound after which silence is noticed: time is left for a second look and the end of
all waits.
"""
_PAUSE_BEATS = 2
"""A wait that took so many beats longer than it should was a pause of this process."""
_COUNT_BYTES = 8
_GONE = (1 << 8 * _COUNT_BYTES) - 1
"""The last count, of a rank that leaves in order."""
_FAILURE = "failure"


class _Connection:
    """A connection to the store, until a call on it fails.

    The answer to a call that timed out may come later, and would be read as that to the next call.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._is_lost = store, False
        self._lock = threading.Lock()

    @contextmanager
    def _use(self) -> Iterator[Store]:
        """For one question. Raises `DistNetworkError` where one has failed before."""
        with self._lock:
            if self._is_lost:
                raise dist.DistNetworkError("an earlier call of the store failed")
            try:
                yield self._store
            except dist.DistError:
                self._is_lost = True
                raise

    def set(self, key: str, value: Any) -> None:
        """As of `Store`."""
        with self._use() as store:
            store.set(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """As of `Store`."""
        with self._use() as store:
            return store.compare_set(key, expected, desired)


class Heartbeat:
    """This rank's sign of life, and what it knows of the others'."""

    def __init__(
        self,
        meeting: Meeting,
        *,
        bound_s: float,
        start_s: float,
        abort: Callable[[GroupError], None],
        is_over: Callable[[], bool],
    ) -> None:
        """A silent rank is named within `bound_s`; `abort` ends the main thread's waits for others,
        and is told why.

        `is_over` says that the groups are gone and nothing is left to abort. Blocks until the
        store answers, `start_s` at most: a first answer may take longer than any later one.

        Raises:
            LinkTimeoutError: the store does not answer.
        """
        self._interval_s, self._patience_s = bound_s / BEATS_PER_BOUND, bound_s * _PATIENCE
        self.connection = _Connection(meeting.connect(timeout_s=start_s, reads_s=self._patience_s))
        """Of its own, for keys of this start; any thread may use it."""
        self.values = SealedStore(self.connection, meeting.key.derive("heartbeat"))
        self._point, self._rank, self._bound_s = meeting.point, meeting.rank, bound_s
        self._peers = [peer for peer in range(meeting.world_size) if peer != meeting.rank]
        self._abort, self._is_over = abort, is_over
        self._asked_s = time.monotonic()
        self._lost: GroupError | None = None
        self._has_reported_own = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> GroupError | None:
        """What ended this start of the group, as far as this rank knows."""
        return self._lost

    def check(self) -> None:
        """Raise `lost`. Call it before a result of GPU sums leaves this rank.

        Aborted sums of GPU tensors raise nowhere, unlike those of CPU tensors.
        """
        if self._lost is not None:
            raise self._lost

    def start(self) -> None:
        """Start the thread; returns at once. It must be stopped before the interpreter ends."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave in order, so that no rank reports this one. Idempotent; nothing is aborted after.

        Blocks until the thread has ended, twice the bound at most.
        """
        if self._thread is None or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(2 * self._bound_s)

    def let_others_read(self) -> None:
        """Return when the others have had two beats' time to read why this rank leaves, where the
        store ends with this process; at once elsewhere."""
        if self._has_reported_own and self._rank == 0 and self._point.is_hosted_by_rank0:
            time.sleep(2 * self._interval_s)

    def report(self, failure: GroupError) -> GroupError:
        """The failure that all ranks report: this one, unless another was reported first.

        Blocks for one answer of the store, or for two where the thread awaits one: `_PATIENCE` of
        the bound each at most.
        """
        return self._report(Failure.of(failure), failure)

    def report_own(self, error: BaseException, *, chunk: int = NO_CHUNK) -> GroupError:
        """Say why this rank is about to leave; the failure that all ranks report. Blocks as
        `report` does."""
        self._has_reported_own |= self._lost is None  # else it follows from what all know
        failure = Failure.of_own(error, rank=self._rank, chunk=chunk)
        return self._report(failure, failure.error())

    def _report(self, failure: Failure, error: GroupError) -> GroupError:
        if self._lost is None:
            try:
                first = self.values.write_first(_FAILURE, failure.encode())
            except dist.DistError:  # the store is gone too
                self._lost = error
            else:
                self._lost = reported_error(first)
        return self._lost

    def cause_of(self, symptom: LinkError) -> GroupError:
        """The failure that a rank has reported, which `symptom` follows from; else `symptom`.

        Blocks as `report` does.
        """
        if self._lost is None:
            try:
                self._lost = self._reported()
            except dist.DistError:  # the store is gone too
                return symptom
        return self._lost or symptom

    def _reported(self) -> GroupError | None:
        """What a rank has reported, if any has."""
        reported = self.values.read(_FAILURE)
        return None if reported is None else reported_error(reported)

    def _run(self) -> None:
        failure: GroupError | None
        is_store_gone = False
        try:
            failure = self._watch()
        except dist.DistError:
            is_store_gone = True
            # A closed connection may be rank0's orderly end, of which the main thread knows soon.
            self._stop.wait(max(0.0, self._patience_s - (time.monotonic() - self._asked_s)))
            silence_s = time.monotonic() - self._asked_s
            failure = LinkTimeoutError(f"{self._point} did not answer for {silence_s:.1f} s")
        if failure is not None and not self._stop.is_set() and not self._is_over():
            if is_store_gone:
                self._lost = failure  # asking the store would take as long once more
            else:
                failure = self.report(failure)
            self._abort(failure)

    def _watch(self) -> GroupError | None:
        """Count up until a rank reports a failure or is silent for too long, or this one leaves."""
        own, beats = 0, dict.fromkeys(self._peers, 0)
        heard_s = dict.fromkeys(self._peers, time.monotonic())
        suspects: set[int] = set()
        while not self._is_leaving_after_pause(heard_s):
            own += 1
            self._beat(own)
            reported = self._reported()
            if reported is not None:
                return reported
            silence_s: dict[int, float] = {}
            for peer in self._peers:
                beat = max(self._beat_of(peer), beats[peer])
                now_s = time.monotonic()
                if beat > beats[peer] or beat == _GONE:
                    beats[peer], heard_s[peer] = beat, now_s
                elif now_s - heard_s[peer] >= self._patience_s:
                    silence_s[peer] = now_s - heard_s[peer]
            silent = sorted(suspects & silence_s.keys())
            if silent:
                longest_s = max(silence_s[peer] for peer in silent)
                return LinkTimeoutError(f"{named(silent)} sent no heartbeat for {longest_s:.1f} s")
            # A stop of this process inside the calls above looks like their silence, once.
            suspects = set(silence_s)
        self._beat(_GONE)
        return None

    def _beat(self, count: int) -> None:
        self.values.write(_beat_key(self._rank), count.to_bytes(_COUNT_BYTES, "little"))

    def _beat_of(self, peer: int) -> int:
        """The count of a rank; 0 where it has not written any, or others have written there."""
        return int.from_bytes(self.values.read(_beat_key(peer)) or b"", "little")

    def _is_leaving_after_pause(self, heard_s: dict[int, float]) -> bool:
        """Wait for the next beat; True when this rank leaves. A longer wait is not silence."""
        before_s = time.monotonic()
        leaves = self._stop.wait(self._interval_s) or self._is_over()
        self._asked_s = time.monotonic()
        missed_s = self._asked_s - before_s - self._interval_s
        if missed_s > _PAUSE_BEATS * self._interval_s:
            for peer in heard_s:
                heard_s[peer] += missed_s
        return leaves


def closed_by(ranks: Iterable[int]) -> PeerLostError:
    """The failure of ranks that closed their connections."""
    return PeerLostError(f"{named(ranks)} closed the connection")


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"
