"""Recorded rollouts of Self-Forcing and Krea come out again, with the same cache indices."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from scope_lab.parity import main, replay
from scope_lab.reference_rollout import Recording
from scope_rt.models.original_names import diffusers_name, to_diffusers
from tests.rounding import PARITY_CONTRACT

pytestmark = pytest.mark.numeric

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["win6", "global", "krea"])
def test_rollout_equals_the_recording(name: str) -> None:
    report = replay(Recording(HERE / f"{name}.safetensors"))
    assert report.trace_matches
    assert report.max_abs_diff <= PARITY_CONTRACT
    assert report.passed


def test_recompute_consumes_the_recorded_context_and_leaves_the_recorded_cache() -> None:
    report = replay(Recording(HERE / "krea.safetensors"))
    assert 0 < report.context_diff <= PARITY_CONTRACT
    assert 0 < report.cache_diff <= PARITY_CONTRACT


def test_a_skipped_recompute_or_anchor_misses_the_recording() -> None:
    recording = Recording(HERE / "krea.safetensors")
    recording.tensors["anchors"] = recording.tensors["anchors"].roll(1, 0)
    assert replay(recording).max_abs_diff > 1e-3
    recording = Recording(HERE / "krea.safetensors")
    del recording.sizes["kv_cache_num_frames"]
    assert not replay(recording).passed


@pytest.mark.parametrize(("key", "value"), [("local_attn", 9), ("sink", 3), ("shift", 3.0)])
def test_another_window_sink_or_schedule_misses_the_recording(key: str, value: float) -> None:
    recording = Recording(HERE / "win6.safetensors")
    recording.sizes[key] = value
    assert not replay(recording).passed


def test_command_prints_the_difference_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(HERE / "global.safetensors"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert 0 < shown["max_abs_diff"] <= PARITY_CONTRACT
    assert len(shown["calls"]) == 20


def test_unreadable_recording_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(HERE / "win6.safetensors", tmp_path)
    assert main([str(tmp_path / "win6.safetensors")]) == 2
    assert "NAME.json beside it" in capsys.readouterr().err


def test_original_names_map_one_to_one() -> None:
    weights = {k: v for k, v in load_file(HERE / "win6.safetensors").items() if k[:6] == "model."}
    renamed = to_diffusers(weights)
    assert len(renamed) == len(weights)
    assert (
        diffusers_name("model.blocks.1.cross_attn.norm_q.weight") == "blocks.1.attn2.norm_q.weight"
    )
    assert to_diffusers(renamed).keys() == renamed.keys()
