"""Every rank says that it lives and listens to the others; of a lost rank all tell the same.

A thread of each rank beats into the store of their meeting, over a connection of its own. A rank
whose beat stands still is lost, and so is a store that gives no answer; both are named within the
bound, so silence is noticed somewhat earlier.
Whoever finds that, or a closed connection, writes it down in the store before acting on it: the
first to write decides what all ranks report. Then the thread ends the conversations of the process
groups, which frees a main thread that waits in one. Time in which this process itself did not run
is held against nobody: nobody is accused by one look alone.
"""

import atexit
import threading
import time
from collections.abc import Callable, Iterable

import torch.distributed as dist

from scope_contracts.errors import LinkError, LinkTimeoutError, PeerLostError
from scope_rt.mesh.rendezvous import Meeting, named

BEATS_PER_BOUND = 20
_PATIENCE = 0.8
"""Share of the bound after which silence is noticed: time is left for a second look and the end of
all waits.
"""
_PAUSE_BEATS = 2
"""A wait that took so many beats longer than it should was a pause of this process."""
_GONE = 1 << 40
"""Far above any count of beats: a rank that leaves in order adds it."""
_FINDING = "finding"
_KINDS: dict[str, type[LinkError]] = {
    kind.__name__: kind for kind in (LinkTimeoutError, PeerLostError)
}


class Heartbeat:
    """This rank's sign of life, and what it knows about the others'."""

    def __init__(
        self,
        meeting: Meeting,
        *,
        bound_s: float,
        abort: Callable[[], None],
        is_over: Callable[[], bool],
    ) -> None:
        """A silent rank is named within `bound_s`; `abort` ends the main thread's waits for others.

        `is_over` says that the groups are gone and nothing is left to abort.

        Raises:
            LinkTimeoutError: the store does not answer.
        """
        self._interval_s, self._patience_s = bound_s / BEATS_PER_BOUND, bound_s * _PATIENCE
        self._store = meeting.connect(timeout_s=self._patience_s)
        self._point, self._rank, self._bound_s = meeting.point, meeting.rank, bound_s
        self._peers = [peer for peer in range(meeting.world_size) if peer != meeting.rank]
        self._abort, self._is_over = abort, is_over
        self._asked_s = time.monotonic()
        self._lost: LinkError | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def lost(self) -> LinkError | None:
        """What ended this start of the group, as far as this rank knows."""
        return self._lost

    def check(self) -> None:
        """Raise `lost`. Call it before a result of GPU sums leaves this rank.

        Aborted sums of GPU tensors raise nowhere, unlike those of CPU tensors.
        """
        if self._lost is not None:
            raise self._lost

    def start(self) -> None:
        """Begin to beat and to listen."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        # A daemon thread inside the store while the interpreter ends would end it by a signal.
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Leave in order: nobody will miss this rank. Idempotent; nothing is aborted after."""
        if self._thread is None or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(2 * self._bound_s)
        atexit.unregister(self.stop)

    def settle(self, finding: LinkError) -> LinkError:
        """What all ranks report: `finding`, unless another was first."""
        if self._lost is None:
            kind = type(finding).__name__
            try:
                said = self._store.compare_set(_FINDING, "", f"{kind}:{finding.args[0]}")
            except dist.DistError:  # nobody to ask
                self._lost = finding
            else:
                self._lost = _decode(said)
        return self._lost

    def explain(self, symptom: LinkError) -> LinkError:
        """What another rank has found about the cause of `symptom`, or else `symptom`."""
        if self._lost is None:
            try:
                if self._store.check([_FINDING]):
                    self._lost = _decode(self._store.get(_FINDING))
            except dist.DistError:  # nobody to ask
                return symptom
        return self._lost or symptom

    def _run(self) -> None:
        finding: LinkError | None
        is_cut_off = False
        try:
            finding = self._listen()
        except dist.DistError:
            is_cut_off = True
            # A closed connection may be rank0's orderly end, of which the main thread knows soon.
            self._stop.wait(max(0.0, self._patience_s - (time.monotonic() - self._asked_s)))
            silence_s = time.monotonic() - self._asked_s
            finding = LinkTimeoutError(f"{self._point} did not answer for {silence_s:.1f} s")
        if finding is not None and not self._stop.is_set() and not self._is_over():
            if is_cut_off:
                self._lost = finding  # asking the store would take as long once more
            else:
                self.settle(finding)
            self._abort()

    def _listen(self) -> LinkTimeoutError | None:
        """Beat until a rank is silent for too long, or until this one leaves."""
        beats = dict.fromkeys(self._peers, 0)
        heard_s = dict.fromkeys(self._peers, time.monotonic())
        suspects: set[int] = set()
        while not self._waited_in_vain(heard_s):
            self._store.add(_beat_key(self._rank), 1)
            silence_s: dict[int, float] = {}
            for peer in self._peers:
                beat = self._store.add(_beat_key(peer), 0)
                now_s = time.monotonic()
                if beat != beats[peer] or beat >= _GONE:
                    beats[peer], heard_s[peer] = beat, now_s
                elif now_s - heard_s[peer] >= self._patience_s:
                    silence_s[peer] = now_s - heard_s[peer]
            silent = sorted(suspects & silence_s.keys())
            if silent:
                longest_s = max(silence_s[peer] for peer in silent)
                return LinkTimeoutError(f"{named(silent)} sent no heartbeat for {longest_s:.1f} s")
            # A stop of this process inside the calls above looks like their silence, once.
            suspects = set(silence_s)
        self._store.add(_beat_key(self._rank), _GONE)
        return None

    def _waited_in_vain(self, heard_s: dict[int, float]) -> bool:
        """Wait for the next beat; True when this rank leaves. A longer wait was no silence."""
        before_s = time.monotonic()
        leaves = self._stop.wait(self._interval_s) or self._is_over()
        self._asked_s = time.monotonic()
        missed_s = self._asked_s - before_s - self._interval_s
        if missed_s > _PAUSE_BEATS * self._interval_s:
            for peer in heard_s:
                heard_s[peer] += missed_s
        return leaves


def closed_by(ranks: Iterable[int]) -> PeerLostError:
    """What to settle about ranks that ended a conversation."""
    return PeerLostError(f"{named(ranks)} closed the connection")


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _decode(finding: bytes) -> LinkError:
    kind, _, text = finding.decode().partition(":")
    return _KINDS[kind](text)
