"""Where the ranks of one start find each other: a store, which listens no wider than it must."""

import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

# Public by its documentation; only the stubs forget it.
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scope_contracts.errors import LinkError, LinkTimeoutError

POLL_S = 0.02
GRACE_S = 1.0
_STORE_TIMEOUT_S = 10.0
_BACKLOG = 128


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
            return self._store(is_master=True, deadline_s=deadline_s, listener=self._listener())
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

    def _listener(self) -> int | None:
        """A socket that listens at the address of the meeting alone, not on all interfaces.

        None where that cannot be had: this process listens there already, or the address is that
        of a gateway before this machine.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            with socket.create_server(address[:2], family=family, backlog=_BACKLOG) as server:
                return server.detach()
        except OSError:
            return None

    def _store(
        self, *, is_master: bool, deadline_s: float, listener: int | None = None
    ) -> TCPStore:
        """One attempt, which takes what is left of the time where it must.

        The client looks up the name of the store's address, and nothing turns that off: where no
        name server answers, that alone takes as long as the resolver waits, 5 s and more.
        """
        left_s = max(GRACE_S, deadline_s - time.monotonic())
        store = TCPStore(
            self.host,
            self.port,
            is_master=is_master,
            timeout=timedelta(seconds=left_s),
            wait_for_workers=False,
            multi_tenant=is_master,
            master_listen_fd=listener,
        )
        store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        return store

    def _silent(self, reason: Exception | None) -> LinkTimeoutError:
        why = "" if reason is None else f" ({reason})"
        return LinkTimeoutError(f"meeting the other ranks: {self} does not answer{why}")


def host_store() -> TCPStore:
    """A store for the ranks of this machine, at a free port; it lives as long as this object."""
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as server:
        host, port = server.getsockname()
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
