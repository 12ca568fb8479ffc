"""The ranks of one start meet each other and no others, whatever keys a store still holds.

A store may outlive many starts, and hosts may count their restarts differently. So every process
draws a random token; rank0 publishes the tokens it sees, the roster, whenever they change; a rank
confirms the roster that holds its own token. Once all ranks of a roster have confirmed it, its hash
prefixes every key that follows.
"""

import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Public by their documentation; only the stubs forget them.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from scope_contracts.errors import LinkError, LinkTimeoutError
from scope_contracts.wire import CanonicalMessage
from scope_rt.mesh.sockets import bound_reads, connections_to, shut_down

POLL_S = 0.02
_GRACE_S = 1.0
_STORE_TIMEOUT_S = 10.0


_RUN = "scope/run"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """The address of the store, and whether rank0 hosts it; a launcher does otherwise."""

    host: str
    port: int
    is_hosted_by_rank0: bool

    def __str__(self) -> str:
        at = f"the store at {self.host}:{self.port}"
        return f"{at}, hosted by rank 0," if self.is_hosted_by_rank0 else at

    def open(self, *, deadline_s: float) -> TCPStore:
        """Host the store in this process, or return the one that it hosts already.

        Raises:
            LinkError: the port is taken.
            LinkTimeoutError: the store could not be reached until `deadline_s`.
        """
        try:
            return self._store(is_master=True, deadline_s=deadline_s)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise self._silent(error) from error
            raise LinkError(
                f"meeting the other ranks: MASTER_PORT {self.port} is taken; choose another"
            ) from error

    def connect(self, *, deadline_s: float) -> TCPStore:
        """A connection of its own; `deadline_s` is of the monotonic clock.

        Raises:
            LinkTimeoutError: nothing answered there until then.
        """
        refusal: Exception | None = None
        while time.monotonic() <= deadline_s:
            try:
                # The store's own attempts cannot be interrupted, and are logged at length.
                socket.create_connection((self.host, self.port), timeout=1.0).close()
                return self._store(is_master=False, deadline_s=deadline_s)
            except (OSError, dist.DistNetworkError) as error:
                refusal = error
                time.sleep(POLL_S)
        raise self._silent(refusal) from refusal

    def _store(self, *, is_master: bool, deadline_s: float) -> TCPStore:
        """One attempt, which takes what is left of the time where it must.

        The client looks up the name of the store's address, and nothing turns that off: where no
        name server answers, that alone takes as long as the resolver waits, 5 s and more.
        """
        left_s = max(_GRACE_S, deadline_s - time.monotonic())
        store = TCPStore(
            self.host,
            self.port,
            is_master=is_master,
            timeout=timedelta(seconds=left_s),
            wait_for_workers=False,
            multi_tenant=is_master,
        )
        store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        return store

    def _silent(self, reason: Exception | None) -> LinkTimeoutError:
        why = "" if reason is None else f" ({reason})"
        return LinkTimeoutError(f"meeting the other ranks: {self} does not answer{why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """All ranks of one start, met: `name` is theirs alone."""

    point: MeetingPoint
    rank: int
    world_size: int
    name: str
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


def host_store() -> TCPStore:
    """A store for the ranks of this machine, at a free port; it lives as long as this object."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        host, port = server.getsockname()
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )


def meet(point: MeetingPoint, *, rank: int, world_size: int, timeout_s: float) -> Meeting:
    """Return when all `world_size` ranks are at `point`.

    Raises:
        LinkTimeoutError: some did not come within `timeout_s`; it names them.
        LinkError: rank0 cannot host the store.
    """
    deadline_s = time.monotonic() + timeout_s
    with _all_calls_end(point, timeout_s=timeout_s, reads_s=timeout_s + _GRACE_S):
        return _met(point, rank, world_size, timeout_s=timeout_s, deadline_s=deadline_s)


@contextmanager
def _all_calls_end(point: MeetingPoint, *, timeout_s: float, reads_s: float) -> Iterator[None]:
    """A store that was stopped takes a connection and answers never; no timeout of its own ends
    that call. So its connections are ended, as often as the client makes new ones, and later reads
    on them by `reads_s`. They are recognised by the port: a name may have many addresses.
    """
    others = connections_to(point.port)
    is_over = threading.Event()

    def end() -> None:
        left_s = timeout_s + _GRACE_S
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
    point: MeetingPoint, rank: int, world_size: int, *, timeout_s: float, deadline_s: float
) -> Meeting:
    hosting = point.is_hosted_by_rank0 and rank == 0
    while True:
        store = (
            point.open(deadline_s=deadline_s) if hosting else point.connect(deadline_s=deadline_s)
        )
        try:
            participant = _Participant(store, rank=rank, world_size=world_size)
            while time.monotonic() < deadline_s:
                name = participant.agreed()
                if name is not None:
                    return Meeting(
                        point=point,
                        rank=rank,
                        world_size=world_size,
                        name=name,
                        store=PrefixStore(name, store),
                        run_id=store.compare_set(_RUN, "", secrets.token_hex(8)).decode(),
                    )
                time.sleep(POLL_S)
            raise LinkTimeoutError(
                f"meeting the other ranks: {named(participant.missing())} did not come within "
                f"{timeout_s:g} s"
            )
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


class _Participant:
    """One rank while the ranks meet."""

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store, self._rank = store, rank
        self._join_keys = [f"scope/join/{other}" for other in range(world_size)]
        self._token, self._roster = secrets.token_hex(8), b""
        store.set(self._join_keys[rank], self._token)

    def agreed(self) -> str | None:
        """Take the next step; the name of this start once all have confirmed the roster."""
        if self._rank == 0 and self._store.check(self._join_keys):
            tokens = tuple(self._store.get(key).decode() for key in self._join_keys)
            roster: Any = Roster(tokens=tokens).encode()  # stubs say str; bytes are taken too
            if roster != self._roster:
                self._store.set("scope/roster", roster)
        if not self._store.check(["scope/roster"]):
            return None
        roster = self._store.get("scope/roster")
        tokens = Roster.decode(roster).tokens
        if len(tokens) != len(self._join_keys) or tokens[self._rank] != self._token:
            return None
        if roster != self._roster:
            self._roster = roster
            self._store.set(self._confirm_key(self._rank), "")
        met = self._store.check([self._confirm_key(other) for other in range(len(tokens))])
        return self._name if met else None

    def missing(self) -> list[int]:
        """The ranks that this one is waiting for."""
        ranks = range(len(self._join_keys))
        absent = [other for other in ranks if not self._store.check([self._join_keys[other]])]
        if absent or not self._roster:  # rank0 would have written a roster that holds us
            return absent or [0]
        return [other for other in ranks if not self._store.check([self._confirm_key(other)])]

    @property
    def _name(self) -> str:
        return f"scope/{hashlib.sha256(self._roster).hexdigest()[:16]}"

    def _confirm_key(self, rank: int) -> str:
        return f"{self._name}/met/{rank}"
