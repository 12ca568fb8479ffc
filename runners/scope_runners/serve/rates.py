"""No client asks faster than its rate for longer than its burst, and what is kept of clients has a
bound."""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

MOST_CLIENTS = 4096
"""That are known at once; the one that asked longest ago is forgotten first."""
BURST_S = 4.0
"""Requests of so many seconds may come at once."""
_IPV6_NETWORK_BITS = 64
"""One client has all addresses of such a network."""


class Rate:
    """A bucket of requests that fills at `per_s`; used on one thread."""

    def __init__(self, per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._left, self._at_s = per_s * BURST_S, clock()

    def take(self) -> float:
        """Take one request; returns 0, or in how many seconds one may be taken."""
        now_s = self._clock()
        self._left = min(self._per_s * BURST_S, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0


class ClientRates:
    """The rate of each client; used on one thread."""

    def __init__(self, per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._clients: OrderedDict[str, Rate] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def take(self, address: str) -> float:
        """As `Rate.take`, of the client with this address."""
        name = _client_of(address)
        rate = self._clients.get(name)
        if rate is None:
            rate = self._clients[name] = Rate(self._per_s, clock=self._clock)
            if len(self._clients) > MOST_CLIENTS:
                self._clients.popitem(last=False)
        self._clients.move_to_end(name)
        return rate.take()


def _client_of(address: str) -> str:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4:
        return address
    return str(ipaddress.ip_network((ip.packed, _IPV6_NETWORK_BITS), strict=False))
