"""Latents of a device that hangs, or of a group that was ended, never become a result."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from scope_contracts.errors import ChunkTimeoutError, LinkError, PeerLostError
from scope_rt.mesh.result_wait import Event, ResultWait

LATENTS = torch.ones(2)


@dataclass
class Device:
    """A device, its clock and its group; `passes_at_s` is when it has finished, None is never."""

    passes_at_s: float | None
    lost_at_s: float | None = None
    fails_with: str = ""
    order: list[str] = field(default_factory=list)
    now_s: float = 0.0

    def event(self, device: torch.device) -> Event:
        self.order.append("recorded")
        return self

    def query(self) -> bool:
        if self.fails_with:
            raise RuntimeError(self.fails_with)
        passed = self.passes_at_s is not None and self.now_s >= self.passes_at_s
        if passed:
            self.order.append("finished")
        return passed

    def nap(self, seconds: float) -> None:
        assert 0 < seconds <= 1e-3, "a chunk must not end late by it"
        self.now_s += seconds

    def check_group(self) -> None:
        if self.passes_at_s is not None and self.now_s >= self.passes_at_s:
            self.order.append("checked")
        if self.lost_at_s is not None and self.now_s >= self.lost_at_s:
            raise PeerLostError("rank 2 closed the connection")

    def wait(self, bound_s: float = 1.0) -> ResultWait:
        return ResultWait(
            bound_s=bound_s,
            check_group=self.check_group,
            event_of=self.event,
            nap=self.nap,
            clock=lambda: self.now_s,
        )


def test_the_group_is_looked_at_after_the_device_has_finished_and_before_anybody_reads() -> None:
    device = Device(passes_at_s=0.3)
    assert torch.equal(device.wait().on_host(LATENTS, chunk=7), LATENTS)
    assert device.order == ["recorded", "finished", "checked"]


def test_sums_that_were_ended_finish_the_device_and_are_no_result() -> None:
    device = Device(passes_at_s=0.3, lost_at_s=0.3)
    with pytest.raises(PeerLostError, match="rank 2 closed the connection"):
        device.wait().on_host(LATENTS, chunk=7)


def test_a_device_that_hangs_is_named_within_the_bound() -> None:
    device = Device(passes_at_s=None)
    with pytest.raises(ChunkTimeoutError, match=r"chunk 7: cpu did not finish within 1 s; .*GROUP"):
        device.wait().on_host(LATENTS, chunk=7)
    assert device.now_s < 1.01


def test_a_rank_that_is_lost_ends_the_wait_for_a_device_that_hangs() -> None:
    device = Device(passes_at_s=None, lost_at_s=0.2)
    with pytest.raises(PeerLostError):
        device.wait(bound_s=60.0).on_host(LATENTS, chunk=7)
    assert device.now_s < 0.21


@pytest.mark.parametrize(("lost_at_s", "error"), [(0.0, LinkError), (None, RuntimeError)])
def test_an_error_of_the_device_is_told_unless_a_lost_rank_explains_it(
    lost_at_s: float | None, error: type[Exception]
) -> None:
    device = Device(passes_at_s=None, lost_at_s=lost_at_s, fails_with="an illegal access")
    with pytest.raises(error):
        device.wait().on_host(LATENTS, chunk=7)


def test_a_cpu_is_not_waited_for_and_its_group_is_looked_at_all_the_same() -> None:
    checks: Iterator[None] = iter([None])
    wait = ResultWait(bound_s=1.0, check_group=lambda: next(checks))
    assert wait.on_host(LATENTS, chunk=7) is LATENTS
    with pytest.raises(StopIteration):
        wait.on_host(LATENTS, chunk=8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_computes_is_waited_for() -> None:
    slow = torch.ones(2, device="cuda")
    torch.cuda._sleep(10**9)
    slow += 1
    assert ResultWait(bound_s=60.0).on_host(slow, chunk=7).tolist() == [2.0, 2.0]
    torch.cuda._sleep(10**10)
    with pytest.raises(ChunkTimeoutError):
        ResultWait(bound_s=0.01).on_host(slow, chunk=8)
    torch.cuda.synchronize()
