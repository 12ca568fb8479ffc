"""The sums of the generator ranks: over gloo for CPU tensors, over NCCL for those of GPUs.

One rank alone has no group and no collective. NCCL connects when the group is built and not in the
first chunk: what keeps it from that is an error of the start, which names rank and interface.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from scope_contracts.errors import LinkError, LinkTimeoutError
from scope_rt.mesh.failures import Liveness
from scope_rt.mesh.group import Group, gloo_group
from scope_rt.mesh.interface import nccl_interface
from scope_rt.mesh.rendezvous import named

T = TypeVar("T")
_NCCL_PATIENCE = 2
"""Bounds after which PyTorch's own watchdog of NCCL ends the process by a signal: after ours."""


class GpuBackend(Protocol):
    """The part of `ProcessGroupNCCL` that ends it and tells how it is."""

    def abort(self) -> None:
        """End all its kernels. Blocks until that is done, or raises RuntimeError after a bound."""
        ...

    def get_error(self) -> Any:
        """A member of `ErrorType`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsGroup:
    """`gpu` is None where sums are of CPU tensors."""

    group: Group
    gpu: GpuBackend | None = None


class TorchCollectives:
    """`Collectives` over a process group."""

    def __init__(self, sums: SumsGroup, liveness: Liveness) -> None:
        self._group, self._gpu, self._liveness = sums.group, sums.gpu, liveness
        self.rank = dist.get_rank(sums.group())
        self.size = dist.get_world_size(sums.group())
        self.wait_s = 0.0
        """Seconds spent inside sums so far: a rank that waits for slow ones spends many. On a
        GPU a sum is only started here, so the wait is not seen."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        start_s = time.perf_counter()
        with self._liveness.named_failures("all_reduce in the generator group"):
            dist.all_reduce(tensor, group=self._group())
        self.wait_s += time.perf_counter() - start_s
        return tensor

    def check(self) -> None:
        """Raises LinkError where NCCL has ended sums by itself; those of gloo raise where they are.

        Never blocks.
        """
        if self._gpu is not None and (error := self._gpu.get_error().name) != "SUCCESS":
            raise LinkError(f"sums of the generator group were ended: NCCL says {error}")


def open_sums(
    ranks: Sequence[int],
    *,
    rank: int,
    device: torch.device,
    timeout_s: float,
    start_s: float,
) -> SumsGroup | None:
    """The group of `ranks`, connected; None on ranks outside it, and where it would have one rank.

    Every rank calls it. `timeout_s` bounds each sum. Blocks for `start_s` at most on a GPU, and as
    gloo does on a CPU.

    Raises:
        LinkTimeoutError, LinkError: NCCL did not connect; it names this rank and the interface.
    """
    if len(ranks) == 1:
        return None
    if device.type != "cuda":
        group = gloo_group(ranks, rank=rank, timeout=timedelta(seconds=timeout_s))
        return None if group is None else SumsGroup(group=group)

    def connect() -> SumsGroup | None:
        return _connected(ranks, rank=rank, device=device, timeout_s=timeout_s)

    where = f"rank {rank}: NCCL over {nccl_interface()}"
    try:
        late = f"{where}: {named(ranks)} did not connect within {start_s:g} s"
        return _within(start_s, connect, late)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0][:160]
        raise LinkError(f"{where}: {first_line}") from error


def _connected(
    ranks: Sequence[int], *, rank: int, device: torch.device, timeout_s: float
) -> SumsGroup | None:
    bound = timedelta(seconds=_NCCL_PATIENCE * timeout_s)
    group = dist.new_group(list(ranks), timeout=bound, backend="nccl", device_id=device)
    if rank not in ranks:
        return None
    gpu: GpuBackend = group._get_backend(device)
    one = torch.ones(1, device=device)
    dist.all_reduce(one, group=group)  # some connections are only made by the first sum
    if one.item() != len(ranks):
        raise LinkError(f"the first sum of {named(ranks)} over NCCL is {one.item()}")
    return SumsGroup(group=Group(group), gpu=gpu)


def _within(bound_s: float, call: Callable[[], T], late: str) -> T:
    """What `call` returns or raises; `LinkTimeoutError` says `late` where it has not by then.

    It runs on a thread that nothing can end: where it is late, that stays until the process ends.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised on the thread that waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="connecting", daemon=True).start()
    if not wait_for([outcome], timeout=bound_s).done:
        raise LinkTimeoutError(late)
    return outcome.result()
