"""Ranks of one host listen on its loopback interface alone; those of several where they must."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from scope_rt.launch_environment import LaunchEnvironment

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


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

    gloo would take the address of the host's name, and NCCL the first interface that is not
    loopback. What a person set holds; NCCL takes gloo's where only that is set. Both read it while
    they connect.
    """
    chosen = os.environ.get(_GLOO) or None
    if chosen is None and are_on_one_host(environment):
        chosen = _loopback_name()
    added = {} if chosen is None else {_GLOO: chosen, _NCCL: f"={chosen}"}
    added = {name: value for name, value in added.items() if not os.environ.get(name)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def nccl_interface() -> str:
    """Where NCCL listens, in words."""
    name = os.environ.get(_NCCL, "")
    return f"interface {name.removeprefix('=')}" if name else f"its own choice ({_NCCL} is not set)"


def _loopback_name() -> str | None:
    """`lo` on Linux, `lo0` elsewhere; None where there is neither."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
