"""The ranks of one start meet each other and no others, whatever keys a store holds.

A store may outlive many starts, hosts may count their restarts differently, and strangers may write
to it. So every process draws a random token; rank0 publishes the tokens it sees, the roster,
whenever they change; a rank confirms the roster that holds its own token. All three are sealed with
the stream's secret. Once all ranks of a roster have confirmed it, its hash prefixes every key that
follows, and a key that follows from it and the secret seals every value.
"""

import hashlib
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch.distributed as dist

# Public by their documentation; only the stubs forget them.
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from scope_contracts.errors import AuthenticationError, LinkError, LinkTimeoutError
from scope_contracts.wire import CanonicalMessage
from scope_rt.environment_names import SECRET
from scope_rt.mesh.authentic import Key, SealedStore, Values
from scope_rt.mesh.meeting_point import GRACE_S, POLL_S, MeetingPoint
from scope_rt.mesh.sockets import bound_reads, connections_to, shut_down
from scope_rt.stream_secret import StreamSecret

_RUN, _ROSTER = "scope/run", "scope/roster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """All ranks of one start, met: `name` is theirs alone."""

    point: MeetingPoint
    rank: int
    world_size: int
    name: str
    key: Key
    """Of this start only; nobody without the stream's secret can find it."""
    store: Store
    """For keys of this start only."""
    run_id: str
    """The same for every start of the ranks by one launcher, however its hosts count restarts."""

    def connect(self, *, timeout_s: float, reads_s: float) -> Store:
        """The same keys over a connection of its own, made within `timeout_s`.

        A later read on it fails after `reads_s` without an answer.

        Raises:
            LinkTimeoutError: the store gave no answer within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        with _all_calls_end(self.point, timeout_s=timeout_s, reads_s=reads_s):
            return PrefixStore(self.name, self.point.connect(deadline_s=deadline_s))

    @contextmanager
    def confirming(self, store: Values) -> Iterator[None]:
        """Confirm again what others write over, until the caller knows that all ranks have met.

        Another rank may yet have to read what this one, which has met all, said last. `store`
        holds the keys of this start, and is used by a thread. Leaving blocks for one answer of it.
        """
        is_over = threading.Event()
        confirmations = _Confirmations(store, self.key)

        def confirm() -> None:
            with suppress(dist.DistError):  # whoever forms the group says it
                while not is_over.wait(POLL_S):
                    confirmations.confirm(self.rank)

        thread = threading.Thread(target=confirm, name="meeting-confirmation", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def meet(
    point: MeetingPoint,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    secret: StreamSecret | None = None,
) -> Meeting:
    """Return when all `world_size` ranks that know `secret` are at `point`.

    Raises:
        LinkTimeoutError: some did not come within `timeout_s`; it names them.
        AuthenticationError: some came without the secret, or with another one; it names them.
        LinkError: rank0 cannot host the store.
    """
    deadline_s = time.monotonic() + timeout_s
    with _all_calls_end(point, timeout_s=timeout_s, reads_s=timeout_s + GRACE_S):
        key = Key.of(secret)
        return _met(point, key, rank, world_size, timeout_s=timeout_s, deadline_s=deadline_s)


@contextmanager
def _all_calls_end(point: MeetingPoint, *, timeout_s: float, reads_s: float) -> Iterator[None]:
    """A store that was stopped takes a connection and answers never; no timeout of its own ends
    that call. So its connections are ended, as often as the client makes new ones, and later reads
    on them by `reads_s`. They are recognised by the port: a name may have many addresses.
    """
    others = connections_to(point.port)
    is_over = threading.Event()

    def end() -> None:
        left_s = timeout_s + GRACE_S
        while not is_over.wait(left_s):
            shut_down(connections_to(point.port) - others)
            left_s = POLL_S

    threading.Thread(target=end, name="meeting-deadline", daemon=True).start()
    try:
        yield
        bound_reads(connections_to(point.port) - others, timeout_s=reads_s)
    finally:
        is_over.set()


def _met(
    point: MeetingPoint,
    key: Key,
    rank: int,
    world_size: int,
    *,
    timeout_s: float,
    deadline_s: float,
) -> Meeting:
    hosting = point.is_hosted_by_rank0 and rank == 0
    while True:
        store = (
            point.open(deadline_s=deadline_s) if hosting else point.connect(deadline_s=deadline_s)
        )
        try:
            participant = _Participant(store, key, rank=rank, world_size=world_size)
            while time.monotonic() < deadline_s:
                start = participant.agreed()
                if start is not None:
                    run = SealedStore(store, key.derive("run"))
                    return Meeting(
                        point=point,
                        rank=rank,
                        world_size=world_size,
                        name=start.name,
                        key=start.key,
                        store=start.store,
                        run_id=run.write_first(_RUN, secrets.token_hex(8).encode()).decode(),
                    )
                time.sleep(POLL_S)
            raise participant.failure(timeout_s)
        except dist.DistNetworkError:  # rank0 closed the store of an earlier session under us
            time.sleep(POLL_S)


def named(ranks: Iterable[int]) -> str:
    """`rank 2`, or `ranks 1, 2`."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster(CanonicalMessage):
    """The tokens of all ranks of one start, by rank, as rank0 publishes them."""

    tokens: tuple[str, ...]


class _Confirmations:
    """Of the ranks of one start that all others have come."""

    def __init__(self, store: Values, key: Key) -> None:
        """`store` holds the keys of that start, `key` is its own."""
        self._values = SealedStore(store, key.derive("met"))

    def confirm(self, rank: int) -> None:
        if not self.has(rank):
            self._values.write(f"met/{rank}", b"")

    def has(self, rank: int) -> bool:
        return self._values.read(f"met/{rank}") is not None


class _Start:
    """What follows from one roster: a name, a key that no other start has, and confirmations.

    Every rank has put a token of its own, drawn now, into the roster: so no key is ever one of an
    earlier start, whatever is played back to a rank.
    """

    def __init__(self, store: Store, key: Key, roster: bytes) -> None:
        self.roster, self.key = roster, key.derive("start", roster)
        self.name = f"scope/{hashlib.sha256(roster).hexdigest()[:16]}"
        self.store = PrefixStore(self.name, store)
        self.confirmations = _Confirmations(self.store, self.key)


class _Participant:
    """One rank while the ranks meet. What it wrote and others altered, it writes again."""

    def __init__(self, store: Store, key: Key, *, rank: int, world_size: int) -> None:
        self._store, self._key, self._rank = store, key, rank
        self._values = SealedStore(store, key.derive("meeting"))
        self._join_keys = [f"scope/join/{other}" for other in range(world_size)]
        self._token = secrets.token_hex(16).encode()
        self._start: _Start | None = None
        self._values.write(self._join_keys[rank], self._token)

    def agreed(self) -> _Start | None:
        """Take the next step; what this start of the ranks is once all have confirmed the roster.

        Raises `FieldError` or `WireError` where rank0 runs another package.
        """
        tokens = self._tokens()
        if tokens[self._rank] != self._token:
            self._values.write(self._join_keys[self._rank], self._token)
        roster = self._values.read(_ROSTER)
        if self._rank == 0:
            mine = Roster(tokens=tuple(each.decode() for each in tokens if each is not None))
            if len(mine.tokens) == len(tokens) and mine.encode() != roster:
                roster = mine.encode()
                self._values.write(_ROSTER, roster)
        if roster is None and self._start is not None:
            # Others wrote there, and a rank0 that has met all writes it no more.
            roster = self._start.roster
        if roster is None or not self._holds_my_token(roster):
            return None
        if self._start is None or roster != self._start.roster:
            self._start = _Start(self._store, self._key, roster)
        self._start.confirmations.confirm(self._rank)
        met = all(self._start.confirmations.has(other) for other in range(len(tokens)))
        return self._start if met else None

    def failure(self, timeout_s: float) -> LinkError:
        """The error that names those who did not come within `timeout_s`."""
        absent = [rank for rank, token in enumerate(self._tokens()) if token is None]
        refused = [rank for rank in absent if self._join_keys[rank] in self._values.refused]
        if refused:
            return AuthenticationError(
                f"meeting the other ranks: {named(refused)} did not come with this stream's "
                f"secret within {timeout_s:g} s; give every rank the same {SECRET}"
            )
        if not absent and self._start is None:  # rank0 would have written a roster that holds us
            absent = [0]
        if not absent and self._start is not None:
            ranks, start = range(len(self._join_keys)), self._start
            absent = [other for other in ranks if not start.confirmations.has(other)]
        return LinkTimeoutError(
            f"meeting the other ranks: {named(absent)} did not come within {timeout_s:g} s"
        )

    def _tokens(self) -> list[bytes | None]:
        return [self._values.read(key) for key in self._join_keys]

    def _holds_my_token(self, roster: bytes) -> bool:
        tokens = Roster.decode(roster).tokens
        if len(tokens) != len(self._join_keys):
            return False
        return tokens[self._rank].encode() == self._token
