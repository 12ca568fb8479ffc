"""In strict no number of a block may be wrong: a fault of one token in one call is found."""

import pytest
import torch

from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import IntegrityLevel
from tests.integrity.audited import AuditedStream, disarmed
from tests.integrity.passing_faults import PASSING_FAULTS, Now, PassingFault
from tests.tiny_models import Rollout


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


@pytest.mark.parametrize("fault", PASSING_FAULTS, ids=str)
def test_a_fault_of_one_call_gets_through_where_its_checks_are_disarmed(
    fault: PassingFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = _stream(*fault.checks)
    audited.run(range(3))
    fault.bring_about(Now(audited.rollout, monkeypatch))
    audited.run([3])
