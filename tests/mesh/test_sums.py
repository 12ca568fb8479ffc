"""NCCL connects at the start or says why not; one rank alone asks nobody for a sum.

NCCL is a double here; what it is told and how its failures are told is real.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scope_contracts.errors import LinkError, LinkTimeoutError
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.mesh.group import Group
from scope_rt.mesh.interface import nccl_interface, needed_interface
from scope_rt.mesh.sums import SumsGroup, TorchCollectives, open_sums

GPU = torch.device("cuda", 1)
BOUND_S = 60.0


@dataclass
class Nccl:
    """What `torch.distributed` is asked for, and `ProcessGroupNCCL`."""

    connect: Callable[[], object] = lambda: None
    total: float = 2.0
    error: str = "SUCCESS"
    asked: list[dict[str, Any]] = field(default_factory=list)
    num_sums: int = 0

    def new_group(self, ranks: list[int], **how: Any) -> "Nccl":
        self.asked.append({"ranks": ranks, **how})
        self.connect()
        return self

    def all_reduce(self, tensor: torch.Tensor, group: object) -> None:
        self.num_sums += 1
        tensor.fill_(self.total)

    def _get_backend(self, device: torch.device) -> "Nccl":
        assert device == GPU
        return self

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.error)

    def abort(self) -> None: ...

    def install(self, patch: pytest.MonkeyPatch) -> "Nccl":
        ones = torch.ones
        patch.setattr(dist, "new_group", self.new_group)
        patch.setattr(dist, "all_reduce", self.all_reduce)
        patch.setattr(dist, "get_rank", lambda group: 0)
        patch.setattr(dist, "get_world_size", lambda group: 2)
        patch.setattr(torch, "ones", lambda size, device: ones(size))
        return self

    def open(self, *, rank: int = 1, start_s: float = 20.0) -> SumsGroup | None:
        return open_sums([1, 2], rank=rank, device=GPU, timeout_s=BOUND_S, start_s=start_s)


def test_nccl_connects_when_the_group_is_built_and_adds_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = Nccl().install(monkeypatch)
    opened = nccl.open()
    assert opened is not None
    assert opened.gpu is nccl
    (asked,) = nccl.asked
    assert (asked["ranks"], asked["backend"], asked["device_id"]) == ([1, 2], "nccl", GPU)
    assert asked["timeout"] > timedelta(seconds=BOUND_S), "our own bound comes first"
    assert nccl.num_sums == 1


def test_a_rank_outside_the_group_is_asked_for_it_and_adds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = Nccl().install(monkeypatch)
    assert nccl.open(rank=0) is None
    assert (len(nccl.asked), nccl.num_sums) == (1, 0)


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")], ids=str)
def test_one_rank_has_no_group(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    nccl = Nccl().install(monkeypatch)
    assert open_sums([1], rank=1, device=device, timeout_s=1.0, start_s=1.0) is None
    assert nccl.asked == []


def test_a_connection_that_does_not_come_is_named_with_rank_and_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = threading.Event()
    nccl = Nccl(connect=lambda: never.wait(60)).install(monkeypatch)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth7")
    started_s = time.monotonic()
    with pytest.raises(
        LinkTimeoutError,
        match=r"rank 1: NCCL over interface eth7: ranks 1, 2 did not connect within 0\.3 s",
    ):
        nccl.open(start_s=0.3)
    assert time.monotonic() - started_s < 20
    never.set()


def test_what_nccl_says_is_told_in_one_line_with_rank_and_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise RuntimeError("no socket interface found\nException raised from ncclCommInit")

    nccl = Nccl(connect=refuse).install(monkeypatch)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with pytest.raises(LinkError) as raised:
        nccl.open()
    assert raised.value.args[0] == (
        "rank 1: NCCL over its own choice (NCCL_SOCKET_IFNAME is not set): no socket interface "
        "found"
    )


def test_a_first_sum_that_is_wrong_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = Nccl(total=1.0).install(monkeypatch)
    with pytest.raises(LinkError, match=r"the first sum of ranks 1, 2 over NCCL is 1\.0"):
        nccl.open()


def test_sums_that_nccl_ended_by_itself_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl: Any = Nccl().install(monkeypatch)
    group: Any = nccl
    liveness: Any = None
    collectives = TorchCollectives(SumsGroup(group=Group(group), gpu=nccl), liveness)
    collectives.check()
    nccl.error = "REMOTE_ERROR"
    with pytest.raises(LinkError, match="NCCL says REMOTE_ERROR"):
        collectives.check()


HERE = LaunchEnvironment(world_size=2, local_world_size=2)
TWO_HOSTS = LaunchEnvironment(world_size=2, local_world_size=1, master_addr="192.0.2.1")


@pytest.mark.parametrize(
    ("environment", "given", "want"),
    [
        (HERE, {}, ("lo", "=lo")),
        (HERE, {"GLOO_SOCKET_IFNAME": "eth0"}, ("eth0", "=eth0")),
        (TWO_HOSTS, {}, (None, None)),
        (TWO_HOSTS, {"GLOO_SOCKET_IFNAME": "eth0"}, ("eth0", "=eth0")),
        (TWO_HOSTS, {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}, ("eth0", "ib0")),
    ],
)
def test_gloo_and_nccl_listen_where_they_must_while_they_connect(
    monkeypatch: pytest.MonkeyPatch,
    environment: LaunchEnvironment,
    given: dict[str, str],
    want: tuple[str | None, str | None],
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with needed_interface(environment):
        assert tuple(os.environ.get(name) for name in names) == want
        if want[1] is not None:
            assert nccl_interface() == f"interface {want[1].removeprefix('=')}"
    assert {name: os.environ[name] for name in names if name in os.environ} == given
