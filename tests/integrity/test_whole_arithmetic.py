"""In strict no number of a block may be wrong: a fault of one token in one call is found."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.integrity import arithmetic
from scope_rt.integrity.block_record import BlockRecord
from scope_rt.models.chunk_attention import CachedSelfAttention
from tests.integrity.audited import AuditedStream, disarmed
from tests.integrity.passing_faults import CALL, LAYER, PASSING_FAULTS, Now, PassingFault
from tests.tiny_models import CONFIG, STEPS, Rollout


def _stream(*without: str) -> AuditedStream:
    rollout = Rollout(sink=1, window=8, dtype=torch.float32)
    return AuditedStream(rollout, IntegrityLevel.STRICT, disarmed(*without))


@pytest.mark.parametrize("fault", PASSING_FAULTS, ids=str)
def test_a_fault_of_one_call_is_found_in_its_chunk(
    fault: PassingFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = _stream()
    audited.run(range(3))
    fault.bring_about(Now(audited.rollout, monkeypatch))
    with pytest.raises(IntegrityError, match=f"chunk 3, rank 0, .*{fault.names}"):
        audited.run([3])


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
@pytest.mark.parametrize("place", ["attention", "query", "block output"])
def test_a_number_that_spoils_all_layers_behind_it_is_named_where_it_arose(
    value: float, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = _stream()
    audited.run(range(3))
    now, attend = Now(audited.rollout, monkeypatch), CachedSelfAttention.__call__

    def spoiled(tensor: Tensor, here: str) -> Tensor:
        if not (now.is_here and here == place):
            return tensor
        tensor = tensor.clone()
        tensor.flatten()[7] = value
        return tensor

    def attending(
        attention: CachedSelfAttention, layer: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        return spoiled(attend(attention, layer, spoiled(q, "query"), k, v), "attention")

    now.replace(CachedSelfAttention, "__call__", attending)
    block = audited.rollout.model.blocks[LAYER]
    block.register_forward_hook(lambda _, given, made: spoiled(made, "block output"))
    with pytest.raises(IntegrityError, match=f"call {CALL}, layer {LAYER}, "):
        audited.run([3])


@pytest.mark.parametrize("fault", PASSING_FAULTS, ids=str)
def test_a_fault_of_one_call_gets_through_where_its_checks_are_disarmed(
    fault: PassingFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = _stream(*fault.checks)
    audited.run(range(3))
    fault.bring_about(Now(audited.rollout, monkeypatch))
    audited.run([3])


@pytest.mark.parametrize("fault", PASSING_FAULTS[::8], ids=str)
def test_what_passes_is_kept_of_few_blocks_at_a_time(
    fault: PassingFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model leaves some hundred MB in one block."""
    for name in ("_MOST_KEPT_BYTES", "_MOST_WAITING_BYTES"):
        monkeypatch.setattr(arithmetic, name, 0)
    audited, num_held = _stream(), list[int]()
    take = arithmetic.ArithmeticCheck._take

    def counted(check: arithmetic.ArithmeticCheck, record: BlockRecord) -> None:
        take(check, record)
        assert check._recorder is not None
        records = check._recorder.records
        num_held.append(sum(bool(each.seen) or each.attended is not None for each in records))

    monkeypatch.setattr(arithmetic.ArithmeticCheck, "_take", counted)
    audited.run(range(3))
    assert num_held == [0] * (3 * CONFIG.num_layers * (len(STEPS) + 1))
    fault.bring_about(Now(audited.rollout, monkeypatch))
    with pytest.raises(IntegrityError, match=f"chunk 3, rank 0, .*{fault.names}"):
        audited.run([3])


def test_nothing_that_is_watched_is_read_on_the_host_before_the_chunk_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each such read would wait for a GPU, in the middle of what it has to do."""
    audited, reads = _stream(), list[str]()
    audited.run(range(3))
    chunk = type(audited.rollout).chunk

    def observed(rollout: Rollout, index: int, **named: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("cpu", "item", "tolist", "__bool__", "__float__", "__int__"):
                patch.setattr(Tensor, name, _noting(name, reads))
            return chunk(rollout, index, **named)

    plain = Rollout(sink=1, window=8, dtype=torch.float32)
    for index in range(3):
        plain.chunk(index)
    observed(plain, 3)
    without, reads[:] = list(reads), []
    monkeypatch.setattr(Rollout, "chunk", observed)
    audited.run([3])
    assert reads == without


def _noting(name: str, reads: list[str]) -> Callable[[Tensor], Any]:
    real = getattr(Tensor, name)

    def noting(tensor: Tensor, *rest: Any) -> Any:
        reads.append(name)
        return real(tensor, *rest)

    return noting
