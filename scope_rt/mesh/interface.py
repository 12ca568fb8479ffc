"""Ranks of one host listen on its loopback interface alone; those of several where they must."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from scope_rt.launch_environment import LaunchEnvironment

_GLOO = "GLOO_SOCKET_IFNAME"


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine as it calls itself, by number or as `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def are_on_one_host(environment: LaunchEnvironment) -> bool:
    """Whether no rank is on another machine, as far as the launcher says."""
    if environment.master_addr is not None and is_loopback(environment.master_addr):
        return True
    return environment.local_world_size == environment.world_size


@contextmanager
def needed_interface(environment: LaunchEnvironment) -> Iterator[None]:
    """Groups that are built in this block listen on loopback where all ranks are on one host.

    gloo would take the address of the host's name. What a person set in `GLOO_SOCKET_IFNAME` holds.
    """
    loopback = _loopback_name()
    if _GLOO in os.environ or loopback is None or not are_on_one_host(environment):
        yield
        return
    os.environ[_GLOO] = loopback
    try:
        yield
    finally:
        del os.environ[_GLOO]


def _loopback_name() -> str | None:
    """`lo` on Linux, `lo0` elsewhere; None where there is neither."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
