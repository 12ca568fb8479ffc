"""A stream computes what a project's own code computed from the same prompt, noise and files."""

import math
from pathlib import Path

import pytest
import torch

from scope_contracts.envelope import PlanId
from scope_lab import parity
from scope_lab.rollouts.command import compare
from scope_lab.rollouts.rank import difference
from tests.real_checkpoints import (
    KREA,
    LONGLIVE,
    SELF_FORCING,
    Recording,
    of_each_recording,
)

for needed in ("diffusers", "ftfy", "tokenizers", "transformers", "yaml"):
    pytest.importorskip(needed)

PLANS = ((PlanId.SINGLE, 1), (PlanId.TP_V1_1, 2), (PlanId.PP0, 1), (PlanId.PP1, 1))


def test_a_window_that_rolls_and_its_sink_are_computed_as_recorded() -> None:
    report = compare(SELF_FORCING, "window")
    assert report.passed, report
    assert report.latents_max_abs_diff > 0, "another implementation rounds otherwise"


def test_a_cache_that_is_recomputed_before_each_chunk_is_as_recorded() -> None:
    """Its 5 heads are not shared evenly by two ranks."""
    report = compare(KREA, "context6", plan=PlanId.TP_V1_1, tp=2)
    assert report.passed, report


def test_a_lora_a_re_cache_and_positions_in_the_window_are_as_recorded() -> None:
    report = compare(LONGLIVE, "infinity")
    assert report.passed, report


def test_a_stream_with_another_window_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in SELF_FORCING.iterdir():
        (folder / path.name).symlink_to(path)
    details = folder / "window.rollout.json"
    text = details.read_text().replace('"local_attn_size": 9', '"local_attn_size": 12')
    details.unlink()
    details.write_text(text)
    assert parity.main([str(folder), "--rollout", "window", "--json"]) == 1
    assert '"trace_matches": false' in capsys.readouterr().out


def test_what_is_no_number_agrees_with_nothing() -> None:
    assert difference(torch.tensor([0.0, torch.nan]), torch.zeros(2)) == math.inf


def test_a_recording_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main([str(SELF_FORCING), "--rollout", "other"]) == 2
    assert "other.rollout.safetensors" in capsys.readouterr().err


@pytest.mark.lab
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plan", "tp"), PLANS)
@of_each_recording
def test_every_recording_is_computed_in_every_plan(
    recording: Recording, plan: PlanId, tp: int
) -> None:
    rollout = recording.path.name.partition(".")[0]
    report = compare(recording.folder, rollout, plan=plan, tp=tp)
    assert report.passed, report
