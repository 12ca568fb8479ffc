"""What ranks add up is the sum of their parts, and a rank's own audit holds for its heads."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.arithmetic import ReducedSum, check_sums
from scope_contracts.envelope import LATENTS_IN
from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.integrity.arithmetic import ArithmeticCheck
from scope_rt.integrity.audit_plan import CallPlanner
from tests.integrity.sharded import sharded
from tests.thread_ranks import ThreadCollectives, on_all_ranks, thread_ranks
from tests.tiny_models import CONFIG, Rollout, envelope

RANKS = 2
DEFAULT, STRICT = IntegrityLevel.DEFAULT, IntegrityLevel.STRICT
Report = tuple[ReducedSum, ...]


class _NoisyOnAll:
    """A group whose sums are off by the same noise on all ranks, and seem right to each."""

    def __init__(self, group: ThreadCollectives) -> None:
        self._group, self.rank, self.size = group, group.rank, group.size
        self.is_noisy = False

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        out = self._group.all_reduce_sum(tensor)
        if self.is_noisy:
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
            out += 1e-4 * noise.to(out.dtype) * out.abs().mean()
        return out


def reports_of(
    num_chunks: int,
    *,
    level: IntegrityLevel,
    dtype: torch.dtype = torch.float32,
    noisy_from: int | None = None,
    break_rank: Callable[[Rollout], None] | None = None,
) -> list[list[Report]]:
    """Every rank's report of every chunk."""
    groups = [_NoisyOnAll(group) for group in thread_ranks(RANKS)]
    of_rank = [sharded(group, dtype) for group in groups]

    def body(rank: int) -> list[Report]:
        group, rollout = groups[rank], of_rank[rank]
        check = ArithmeticCheck(rollout.generator, level=level, rank=rank)
        planner = CallPlanner()
        if break_rank is not None and rank == 1:
            break_rank(rollout)
        reports = []
        for chunk in range(num_chunks):
            group.is_noisy = noisy_from is not None and chunk >= noisy_from
            plan, tensors = envelope(chunk, bias=0.6), {LATENTS_IN: rollout.noise(chunk)}
            check.begin(plan, tensors, planner.calls(plan, tensors))
            rollout.chunk(chunk, bias=0.6)
            check.end()
            reports.append(check.report())
        return reports

    return on_all_ranks(RANKS, body)


def compare(reports: Sequence[Sequence[Report]], ranks: Sequence[int] = (0, 1)) -> None:
    for chunk, of_chunk in enumerate(zip(*reports, strict=True)):
        check_sums(chunk, of_chunk, ranks)


@pytest.mark.numeric
@pytest.mark.parametrize("level", [DEFAULT, STRICT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clean_group_passes(level: IntegrityLevel, dtype: torch.dtype) -> None:
    reports = reports_of(4, level=level, dtype=dtype)
    assert len(reports[0][0]) == 5 * CONFIG.num_layers * 4
    compare(reports)


@pytest.mark.parametrize("level", [DEFAULT, STRICT])
def test_noise_that_all_ranks_agree_on_is_found_in_its_chunk(level: IntegrityLevel) -> None:
    reports = reports_of(3, level=level, noisy_from=2)
    with pytest.raises(IntegrityError, match=r"chunk 2, rank 0, call [0-9], layer [0-9]"):
        compare(reports)


def test_a_rank_that_multiplies_coarsely_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    real, coarse = torch.nn.functional.linear, threading.local()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if getattr(coarse, "is_on", False):
            return real(x.bfloat16().float(), weight.bfloat16().float(), bias)
        return real(x, weight, bias)

    def turn_on(rollout: Rollout) -> None:
        coarse.is_on = True

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    with pytest.raises(IntegrityError, match=r"chunk 0, rank 1, call 0, layer 0, .*to_q"):
        reports_of(1, level=DEFAULT, break_rank=turn_on)


def a_sum(**changed: float) -> ReducedSum:
    made = ReducedSum(name="s", given=1.0, got=2.0, squares=1.0, roundoff=2.0**-24)
    return replace(made, **changed)  # type: ignore[arg-type]


def test_a_sum_that_one_rank_got_wrong_names_the_rank() -> None:
    check_sums(5, [[a_sum()], [a_sum()]], [3, 4])
    with pytest.raises(IntegrityError, match=r"chunk 5, rank 4, s: .*got 2.00001, want 2 within"):
        check_sums(5, [[a_sum()], [a_sum(got=2.00001)]], [3, 4])
    with pytest.raises(IntegrityError, match="rank 3"):
        check_sums(5, [[a_sum(got=float("nan"))], [a_sum()]], [3, 4])


def test_ranks_that_watched_other_sums_are_told_so() -> None:
    with pytest.raises(IntegrityError, match="chunk 5: rank 4 watched"):
        check_sums(5, [[a_sum()], []], [3, 4])
