"""Every failure of a backend becomes the link error that names the lost rank, where it is known.

Where a rank left because something was computed wrong, it becomes that `IntegrityError`.
"""

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from scope_contracts.errors import IntegrityError, LinkError, LinkTimeoutError, PeerLostError
from scope_contracts.wire import CanonicalMessage
from scope_rt.mesh.group import release_frames
from scope_rt.mesh.heartbeat import Heartbeat, closed_by
from scope_rt.mesh.reported import GroupError
from scope_rt.mesh.sockets import Address
from scope_rt.watchdog import Watchdog

_CLOSED = ("closed", "reset", "broken pipe", "connection refused", "not connected")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddresses(CanonicalMessage):
    """This rank's ends of gloo's connections."""

    addresses: tuple[Address, ...]


class Liveness:
    """Turns what a backend says of a failure into the link error that names the lost rank."""

    def __init__(self, heartbeat: Heartbeat, watchdog: Watchdog | None = None) -> None:
        """`watchdog` looks after what ends neither by its own bound nor by an abort."""
        self._heartbeat, self._watchdog = heartbeat, watchdog or Watchdog()
        self.rank_by_address: Mapping[Address, int] = {}
        """The ends of gloo's connections, once groups are built."""

    @contextmanager
    def named_failures(self, what: str, *, peer: int | None = None) -> Iterator[None]:
        """Turn failures of `what` into the error that all ranks report.

        `peer` is the other rank where it is one.
        """
        try:
            with self._watchdog.section(what, is_bounded=False, is_wait=True, ends_with_group=True):
                yield
        except RuntimeError as error:
            release_frames(error)
            cause = self._cause(_link_error(str(error)), str(error), peer)
            if isinstance(cause, IntegrityError):  # which says where it was found
                raise _another(cause) from error
            raise type(cause)(f"{what}: {cause.args[0]}") from error

    def _cause(self, symptom: LinkError, text: str, peer: int | None) -> GroupError:
        if isinstance(symptom, PeerLostError):
            peer = self._mentioned(text) if peer is None else peer
            if peer is not None:
                return self._heartbeat.report(closed_by([peer]))
        return self._heartbeat.cause_of(symptom)

    def _mentioned(self, text: str) -> int | None:
        """The rank whose address gloo names: its port in network byte order."""
        address = re.search(r"\[([^\]]+)\]:(\d+)", text)
        if address is None:
            return None
        host, port, by_address = address[1], int(address[2]), self.rank_by_address
        return by_address.get((host, socket.ntohs(port)), by_address.get((host, port)))


def _another(cause: IntegrityError) -> IntegrityError:
    """Of the same content: every raise adds its own traceback to an error."""
    error = IntegrityError(cause.args[0])
    error.suspect_from = cause.suspect_from
    return error


def _link_error(text: str) -> LinkError:
    # Without gloo's source path.
    message = re.sub(r"^\[[^]]*\]\s*", "", text.partition("\n")[0])[:160]
    lowered = text.lower()
    if "timed out" in lowered or "timeout" in lowered:
        return LinkTimeoutError("no answer within the bound")
    if any(sign in lowered for sign in _CLOSED):
        return PeerLostError(f"the peer is gone ({message})")
    return LinkError(message)
