"""Text K/V and modulations that were made wrong are found in the chunk that makes them."""

import pytest
import torch

from scope_contracts.arithmetic import ReducedSum, check_sums
from scope_contracts.errors import IntegrityError
from tests.integrity.audited import Fault
from tests.integrity.edged import MADE_FAULTS, REPLACED, EdgedStream, edged_stream
from tests.integrity.sharded import sharded
from tests.thread_ranks import on_all_ranks, thread_ranks
from tests.tiny_models import CONFIG

FAULTS = pytest.mark.parametrize("fault", MADE_FAULTS, ids=str)


@FAULTS
@pytest.mark.parametrize("every", [1, 8])
def test_what_is_made_wrong_is_found_at_once_at_any_level(
    fault: Fault, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    edged = edged_stream(every=every)
    edged.run(range(3))
    fault.bring_about(edged.rollout, monkeypatch)
    with pytest.raises(IntegrityError, match=rf"chunk 3, rank 0: {fault.names}"):
        edged.run([3], new_text=True)


@FAULTS
def test_without_the_check_it_is_used(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    edged = edged_stream(check="made", every=8)
    edged.run(range(3))
    fault.bring_about(edged.rollout, monkeypatch)
    edged.run([3], new_text=True)


def test_text_that_no_chunk_has_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    edged = edged_stream(every=8)
    edged.run(range(3))
    REPLACED.bring_about(edged.rollout, monkeypatch)
    with pytest.raises(IntegrityError, match=rf"chunk 3, rank 0: {REPLACED.names}"):
        edged.run([3])


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_ranks_compare_the_sums_that_norm_their_text(dtype: torch.dtype, is_wrong: bool) -> None:
    groups = thread_ranks(2)
    of_rank = [sharded(group, dtype) for group in groups]

    def body(rank: int) -> tuple[ReducedSum, ...]:
        edged = EdgedStream(of_rank[rank], rank=rank)
        edged.run([0])
        made = edged.report()
        for block in of_rank[rank].model.blocks:
            if is_wrong:
                block.group = _Wrong(block.group)  # type: ignore[assignment]
        edged.run([1], new_text=True)
        assert len(made) == CONFIG.num_layers
        return edged.report()

    reports = on_all_ranks(2, body)
    if not is_wrong:
        check_sums(1, reports, [0, 1])
        return
    with pytest.raises(IntegrityError, match="sum of squares of text keys of layer"):
        check_sums(1, reports, [0, 1])


class _Wrong:
    """Sums that are too large for all ranks alike."""

    def __init__(self, group: object) -> None:
        self._group = group

    def __getattr__(self, name: str) -> object:
        return getattr(self._group, name)

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce_sum(tensor) * 1.5  # type: ignore[attr-defined, no-any-return]
