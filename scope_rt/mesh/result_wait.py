"""A result is waited for with a bound, then the group is looked at, and only then is it a result.

Sums of GPU tensors that were aborted raise nowhere: the device goes on with garbage. So latents
leave the device once it has finished, and nobody may read them unless the group is whole
afterwards. On a CPU the same lines run: its sums raise by themselves, and nothing is awaited.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from scope_contracts.errors import ChunkTimeoutError

_FIRST_NAP_S, _LONGEST_NAP_S = 50e-6, 1e-3


class Event(Protocol):
    """A point in what a device has to do."""

    def query(self) -> bool:
        """Whether the device has passed it; never blocks. Raises RuntimeError where it failed."""
        ...


def device_event(device: torch.device) -> Event | None:
    """After all that was given to `device` so far; None where nothing runs beside this thread."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def whole_group() -> None:
    """There is no other rank that could have been lost."""


class ResultWait:
    """One generator rank's way to bring latents to the host."""

    def __init__(
        self,
        *,
        bound_s: float,
        check_group: Callable[[], None] = whole_group,
        event_of: Callable[[torch.device], Event | None] = device_event,
        nap: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`check_group` raises where a rank was lost, or sums were ended."""
        self._bound_s, self._check_group = bound_s, check_group
        self._event_of, self._nap, self._clock = event_of, nap, clock

    def on_host(self, latents: Tensor, *, chunk: int) -> Tensor:
        """`latents` on the CPU, complete, and of a group that is whole.

        Blocks until the device has finished, `bound_s` at most.

        Raises:
            LinkError, IntegrityError: what ended the group, as soon as this rank knows of it.
            ChunkTimeoutError: the device did not finish in time.
            RuntimeError: the device failed.
        """
        event = self._event_of(latents.device)
        if event is not None:
            self._await(event, latents.device, chunk)
        self._check_group()
        return latents.cpu()

    def _await(self, event: Event, device: torch.device, chunk: int) -> None:
        end_s, nap_s = self._clock() + self._bound_s, _FIRST_NAP_S
        while not self._has_passed(event):
            self._check_group()
            if self._clock() >= end_s:
                raise ChunkTimeoutError(
                    f"chunk {chunk}: {device} did not finish within {self._bound_s:g} s; a kernel "
                    "hangs, or a sum waits for a rank that does not come; if a chunk takes that "
                    "long, raise group_timeout_s (SCOPE_GROUP_TIMEOUT_S)"
                )
            self._nap(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)

    def _has_passed(self, event: Event) -> bool:
        try:
            return event.query()
        except RuntimeError:
            self._check_group()  # a lost rank explains what the device says
            raise
