"""A folder is told in words, and what could not be streamed is refused by its file and tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scope_runners.main import main
from tests.real_checkpoints import FASTVIDEO, KREA, LONGLIVE, SELF_FORCING, copied

pytest.importorskip("yaml")
pytest.importorskip("diffusers")

PT = "checkpoints/self_forcing_dmd.pt"
SHARD = "transformer/diffusion_pytorch_model-00002-of-00002.safetensors"
LORA = "longlive_models/models/lora.pt"
VAE = "wan_models/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth"
TO_Q, A = "blocks.1.attn1.to_q.weight", "base_model.model.blocks.0.self_attn.q.lora_A.weight"
Weights = dict[str, Any]


def inspected(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main(["model", "inspect", str(folder), "--json", *more]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize(
    ("folder", "family", "state_dict", "lora"),
    [
        (SELF_FORCING, "self-forcing-1.3b", "generator_ema", None),
        (LONGLIVE, "longlive-1.3b", "generator", LORA),
        (KREA, "krea-14b", "", None),
        (FASTVIDEO, "fastvideo-1.3b", "", None),
    ],
)
def test_a_checkpoint_is_told_with_its_family_parts_and_memory(
    folder: Path,
    family: str,
    state_dict: str,
    lora: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = inspected(folder, capsys)
    assert report["family"] == family
    assert report["transformer"]["state_dict"] == state_dict
    assert report["lora"] == lora
    assert report["vae_dtypes"] == ["float32"]
    assert report["text_dtypes"] == ["float32" if folder is FASTVIDEO else "bfloat16"]
    assert report["transformer"]["text_dim"] == 64
    plans = {(each["plan"], each["dtype"]): each["bytes"] for each in report["memory"]}
    assert {plan for plan, _ in plans} >= {"single", "pp0", "pp1"}
    assert plans["single", "bfloat16"] < plans["single", "float32"]


def test_another_recipe_is_told_as_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "recipes"]) == 0
    assert "krea-14b" in capsys.readouterr().out.split()
    assert main(["model", "recipes", "self-forcing-1.3b"]) == 0
    mine = tmp_path / "mine.toml"
    mine.write_text(capsys.readouterr().out.replace("window_frames = 21", "window_frames = 12"))
    report = inspected(SELF_FORCING, capsys, "--recipe", str(mine))
    assert report["recipe"]["window_frames"] == 12


def test_a_configuration_that_krea_s_own_code_does_not_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(KREA, tmp_path)
    want = inspected(folder, capsys)["recipe"]
    (folder / "configs").mkdir()
    config = folder / "configs/self_forcing_server_14b.yaml"
    config.write_text("denoising_step_list: [1000]\nnum_frame_per_block: 1\n")
    report = inspected(folder, capsys)
    assert report["recipe"] == want
    assert report["settings_not_from"] == ["configs/self_forcing_server_14b.yaml"]
    assert main(["model", "inspect", str(folder)]) == 0
    said = "the family alone; configs/self_forcing_server_14b.yaml has none that count"
    assert said in capsys.readouterr().out


def test_a_recipe_of_other_files_than_these_is_said_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(SELF_FORCING, tmp_path)
    shutil.rmtree(folder / "configs")
    asked = ["--model", str(folder), "--recipe", "causal-forcing-chunk-1.3b"]
    size = ["--height", "48", "--width", "80", "--seconds", "0.5"]
    out = ["--prompt", "a", "--out", str(tmp_path / "a.mp4")]
    assert main(["stream", *asked, *size, *out]) == 0
    said = "causal-forcing-chunk-1.3b is what --recipe says; the files are as those of self-forcing"
    assert said in capsys.readouterr().err
    assert main(["model", "inspect", str(folder), *asked[2:]]) == 0
    assert "chunk-1.3b; looks like self-forcing-1.3b\n" in capsys.readouterr().out


def in_pt(file: str, change: Callable[[Weights], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        states = torch.load(folder / file, weights_only=True)
        torch.save(change(states) or states, folder / file)

    return spoil


def in_shard(change: Callable[[Weights], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / SHARD)
        change(weights)
        save_file(weights, folder / SHARD)

    return spoil


def cut(file: str, num_bytes: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_bytes()[:num_bytes])

    return spoil


def in_config(name: str, value: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "transformer/config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return spoil


def lora(change: Callable[[Weights], object]) -> Callable[[Path], None]:
    def in_states(states: Weights) -> None:
        change(states["generator_lora"])

    return in_pt(LORA, in_states)


@pytest.mark.parametrize(
    ("source", "spoil", "names"),
    [
        (SELF_FORCING, in_pt(PT, lambda s: {"state": s["generator_ema"]}), [PT, "generator_ema"]),
        (SELF_FORCING, in_pt(PT, lambda s: {"generator": s["generator_ema"]}), ["generator_ema"]),
        (SELF_FORCING, cut(PT, 120_000), ["self_forcing_dmd.pt"]),
        (
            SELF_FORCING,
            in_pt(VAE, lambda s: s | {"conv2.weight": torch.zeros(8, 8, 1, 1, 1)}),
            ["Wan2.1_VAE.pth", "conv2.weight"],
        ),
        (FASTVIDEO, cut(SHARD, 100_000), [SHARD, "ends beyond it"]),
        (FASTVIDEO, in_shard(lambda w: w.pop(TO_Q)), ["index.json", TO_Q]),
        (
            FASTVIDEO,
            in_shard(lambda w: w.update({TO_Q: torch.zeros(63, 64)})),
            [SHARD.partition("/")[2], TO_Q, "[63, 64]"],
        ),
        (FASTVIDEO, in_config("_class_name", "Other"), ["transformer/config.json", "Other"]),
        (FASTVIDEO, in_config("num_layers", 3), ["config.json", "blocks.2"]),
        (LONGLIVE, lora(lambda w: w.update({A: torch.zeros(8, 96)})), ["lora.pt", A]),
        (
            LONGLIVE,
            lora(lambda w: w.pop(A.replace("_A", "_B"))),
            ["lora.pt", A.replace("_A", "_B")],
        ),
        (LONGLIVE, in_pt(LORA, lambda s: {"critic_lora": s["critic_lora"]}), ["generator_lora"]),
    ],
)
def test_what_could_not_be_streamed_is_one_sentence_and_code_2(
    tmp_path: Path,
    source: Path,
    spoil: Callable[[Path], None],
    names: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = copied(source, tmp_path)
    spoil(folder)
    assert main(["model", "inspect", str(folder)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    for name in names:
        assert name in said.err
