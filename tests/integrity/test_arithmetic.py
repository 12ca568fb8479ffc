"""Every fault of the arithmetic is found, by the check that is there for it and by no other."""

import pytest
import torch

from scope_contracts.cache_spec import CacheChoice
from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.checks import Checks
from scope_rt.models.recipe_choices import Positions
from tests.integrity.audited import FAULTS, NUM_TURNS, AuditedStream, Fault, disarmed
from tests.integrity.turning_faults import WINDOW_FAULTS
from tests.tiny_models import Rollout

CACHES = ("ring", "quantized:int8", "quantized:int4", "h2o", "paged:fp8", "hierarchical")
DEFAULT, STRICT = IntegrityLevel.DEFAULT, IntegrityLevel.STRICT
IN_EPOCH, IN_WINDOW = Positions.IN_EPOCH, Positions.IN_WINDOW
EITHER = pytest.mark.parametrize("positions", Positions)
OF_EITHER = pytest.mark.parametrize(
    ("positions", "fault"),
    [(IN_EPOCH, fault) for fault in FAULTS] + [(IN_WINDOW, fault) for fault in WINDOW_FAULTS],
    ids=str,
)


def stream(
    level: IntegrityLevel,
    checks: Checks | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    cache: str = "ring",
    backend: str = "sdpa",
    positions: Positions = IN_EPOCH,
) -> AuditedStream:
    choice = CacheChoice.named(cache)
    rollout = Rollout(sink=1, window=8, dtype=dtype, cache=choice, backend=backend)
    rollout.generator.positions = positions
    return AuditedStream(rollout, level, checks)


@pytest.mark.numeric
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.lab)]
)
@pytest.mark.parametrize("cache", CACHES)
@EITHER
def test_a_clean_stream_passes(positions: Positions, cache: str, dtype: torch.dtype) -> None:
    stream(STRICT, dtype=dtype, cache=cache, positions=positions).run(range(5))


@pytest.mark.numeric
@pytest.mark.parametrize("backend", ["lse_merge", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clean_stream_passes_with_every_backend(backend: str, dtype: torch.dtype) -> None:
    stream(STRICT, dtype=dtype, backend=backend).run(range(4))


@pytest.mark.numeric
@EITHER
def test_a_clean_stream_passes_in_rotation(positions: Positions) -> None:
    stream(DEFAULT, positions=positions).run(range(NUM_TURNS + 1))


def test_a_stream_that_is_audited_now_and_then_takes_its_turns_as_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audited = AuditedStream(stream(DEFAULT).rollout, DEFAULT, every=4)
    audited.run(range(4))
    FAULTS[-1].bring_about(audited.rollout, monkeypatch)
    with pytest.raises(IntegrityError, match=r"chunk 4, rank 0, call 1, layer 1, token"):
        audited.run(range(4, 8))


@OF_EITHER
def test_strict_finds_a_fault_in_its_chunk(
    positions: Positions, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = stream(STRICT, positions=positions)
    audited.run(range(3))
    fault.bring_about(audited.rollout, monkeypatch)
    with pytest.raises(IntegrityError, match=f"chunk 3, rank 0, .*{fault.names}"):
        audited.run([3])


@OF_EITHER
def test_default_finds_a_fault_within_its_turns(
    positions: Positions, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = stream(DEFAULT, positions=positions)
    audited.run(range(3))
    fault.bring_about(audited.rollout, monkeypatch)
    with pytest.raises(IntegrityError, match=f"rank 0, .*{fault.names}"):
        audited.run(range(3, 3 + NUM_TURNS))


@OF_EITHER
def test_a_fault_gets_through_where_its_check_is_disarmed(
    positions: Positions, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = stream(STRICT, disarmed(fault.check), positions=positions)
    audited.run(range(3))
    fault.bring_about(audited.rollout, monkeypatch)
    audited.run([3])


@pytest.mark.parametrize("cache", ["quantized:int4", "paged:int8"])
def test_a_codec_s_write_that_is_skipped_is_found(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited = stream(STRICT, cache=cache)
    audited.run(range(3))
    FAULTS[0].bring_about(audited.rollout, monkeypatch)
    with pytest.raises(IntegrityError, match=r"chunk 3, rank 0, call 3, layer 1, .*cached keys"):
        audited.run([3])


def test_a_chunk_that_failed_leaves_nothing_behind() -> None:
    audited = stream(STRICT)
    audited.run(range(2))
    calls = audited.rollout.generator.cache
    calls.reset()
    with pytest.raises(Exception, match="cache ends at token"):
        audited.run([2])
    audited.check.abandon()
    assert not any(block._forward_hooks for block in audited.rollout.model.blocks)
    assert not any("forward" in vars(module) for module in audited.rollout.model.modules())
