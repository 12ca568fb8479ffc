"""Tensors that were computed twice: the number that is furthest off is told, with its place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scope_contracts.arithmetic import Deviation


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hands `check` what is off; does nothing where all is right. Waits for the tensors' device."""

    check: Callable[[Deviation], None]
    where: str
    """Chunk and rank."""

    def close(
        self, calls: Sequence[int], stage: str, got: Tensor, want: Tensor, bound: Tensor
    ) -> None:
        """Numbers `[len(calls), ...]`, at most `bound` apart; `want` is in float64.

        What follows from a number that is none is none as well, and is refused where it came from.
        """
        off = (got - want).abs_()
        is_by_row = bound.dim() > 0 and bound.shape[-1] == 1
        if bool(((off.amax(-1, keepdim=True) if is_by_row else off) <= bound).all()):
            return
        want, bound = want.expand_as(off), bound.expand_as(off)
        excess = (off - bound).masked_fill_(got.isnan() & want.isnan(), -torch.inf).flatten(1)
        is_off = ~(excess <= 0).all(1)
        if not bool(is_off.any()):
            return
        first = int(is_off.int().argmax())  # later calls may be off because of it
        at = torch.unravel_index(excess[first].argmax(), off.shape[1:])  # NaN is the largest
        place = tuple(int(index) for index in at)
        numbers = (each[first][place] for each in (got, want, bound))
        self._tell(calls[first], f"{stage}, number {place}", *numbers)

    def same(self, call: int, stage: str, got: Tensor, want: Tensor) -> None:
        """Bit for bit but for the sign of a zero; -1 is no call."""
        if got is want or torch.equal(got, want):
            return
        if got.shape != want.shape:
            self.count(f"numbers of {stage}", got=got.numel(), want=want.numel())
            return
        self.close([call], stage, got[None].double(), want[None].double(), torch.zeros(()))

    def count(self, stage: str, *, got: int, want: int) -> None:
        """How often something was there."""
        if got != want:
            self._tell(-1, stage, got, want, 0)

    def _tell(self, call: int, stage: str, *numbers: Tensor | float) -> None:
        got, want, bound = map(float, numbers)
        where = self.where if call < 0 else f"{self.where}, call {call}"
        self.check(Deviation(where=where, stage=stage, got=got, want=want, bound=bound))
