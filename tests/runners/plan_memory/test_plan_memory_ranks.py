"""Every rank of a stream is planned: the one that controls it, and those that generate."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scope_contracts.errors import UserInputError
from scope_rt.models.family import Family
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_runners.main import main
from scope_runners.plan_memory.control import num_weights_in
from scope_runners.plan_memory.presets import PRESETS, VideoModel
from tests.lab.live_bytes import LiveBytes
from tests.real_checkpoints import SELF_FORCING

GPU_24 = ["--gpu-gib", "24"]
WIDTH = 4
"""Bytes of a float32 number."""


def report(arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    main(["plan-memory", "--json", *arguments.split()])
    return json.loads(capsys.readouterr().out)


def lines(rank: Any) -> dict[str, int]:
    return {line["name"]: line["bytes"] for line in rank["lines"]}


@pytest.mark.parametrize(
    ("plan", "roles"),
    [
        ("--plan single", {"control and generator": [0]}),
        ("--plan tp_v0 --tp 2", {"control and generator": [0, 1]}),
        ("--plan tp_v1_1 --tp 4", {"control and generator": [0], "generator": [1, 2, 3]}),
        ("--plan pp0", {"control": [0], "generator": [1]}),
        ("--plan pp1 --tp 2", {"control": [0], "generator": [1, 2]}),
    ],
)
def test_every_rank_has_its_role_and_a_gpu(
    plan: str, roles: dict[str, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    printed = report(f"--model krea-14b {plan}", capsys)
    assert {part["role"]: part["ranks"] for part in printed["ranks"]} == roles
    assert printed["num_gpus"] == sum(map(len, roles.values()))
    for part in printed["ranks"]:
        held = lines(part)
        assert ("text encoder" in held) is ("decoder memory" in held) is ("control" in part["role"])
        assert ("weights" in held) is ("cache" in held) is ("generator" in part["role"])
        assert "runtime" in held


SIZES = "--model wan-1.3b --plan pp1 --dtype bf16 --gpu h100"


@pytest.mark.parametrize(
    ("given", "ranks", "num_gpus"),
    [
        ("--tp 1 --control-device cuda:0", {"control and generator": [0, 1]}, 1),
        (
            "--tp 2 --control-device cuda:1",
            {"control and generator": [0, 2], "generator": [1]},
            2,
        ),
        ("--tp 2 --control-device cuda:2", {"control": [0], "generator": [1, 2]}, 3),
        ("--tp 2 --control-device cpu", {"control": [0], "generator": [1, 2]}, 2),
    ],
)
def test_rank0_may_share_a_gpu_or_have_none(
    given: str, ranks: dict[str, list[int]], num_gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    apart = report(SIZES, capsys)["ranks"]
    shared = report(f"{SIZES} {given}", capsys)
    assert {part["role"]: part["ranks"] for part in shared["ranks"]} == ranks
    assert shared["num_gpus"] == num_gpus
    if num_gpus == 1:  # two processes, which work at the same time
        (both,) = shared["ranks"]
        assert both["total_bytes"] == sum(part["total_bytes"] for part in apart)
    first = shared["ranks"][0]
    assert (first["fits"] is None) is ("cpu" in given)
    if "cpu" in given:
        assert lines(first)["text encoder"] == 2 * lines(apart[0])["text encoder"]  # float32


def test_a_shared_gpu_that_is_too_small_is_given_up_for_the_cpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan-memory", *SIZES.split()[:-2], "--control-device", "cuda", *GPU_24]) == 1
    assert "fits with any one of: " in (said := capsys.readouterr().out)
    assert "--control-device cpu" in said
    assert "ranks 0 and 1, together on one GPU: control and generator" in said
    assert main(["plan-memory", *SIZES.split()[:-2], "--control-device", "cpu", *GPU_24]) == 0
    assert "rank 0, on the CPU: control" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--plan single --control-device cpu", "rank0 of plan single generates"),
        ("--plan pp0 --control-device tpu", "control_device: got 'tpu', want cpu, or cuda:0"),
        ("--model mha-52 --control-device cpu", "for video models only: --control-device"),
    ],
)
def test_a_device_that_rank0_cannot_have_is_refused(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan-memory", *given.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "torch.bfloat16"])
def test_a_dtype_is_written_as_for_a_stream(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(f"--model wan-1.3b --dtype {name}", capsys)["dtype"] == "bfloat16"


def test_the_dtype_is_the_one_that_a_stream_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "stream.scope"
    files = ["--out", str(tmp_path / "video.mp4"), "--record", str(record)]
    assert main(["stream", "--prompt", "a red circle", "--seconds", "1", "--json", *files]) == 0
    capsys.readouterr()
    assert main(["inspect", str(record), "--json"]) == 0
    (opened,) = json.loads(capsys.readouterr().out)["opened"]
    assert report("--model tiny", capsys)["dtype"] == opened["dtype"]


def test_another_dtype_than_a_streams_default_comes_with_where_a_stream_is_given_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for dtype, is_said in (("float32", False), ("bfloat16", True)):
        main(["plan-memory", "--model", "krea-14b", "--dtype", dtype])
        shown = capsys.readouterr().out
        assert f"krea-14b, {dtype}, " in shown
        assert ("float32 on CPUs and bfloat16 on GPUs unless --dtype" in shown) is is_said


def test_a_control_rank_that_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--model wan-1.3b --plan pp0 --dtype float32 --gpu-gib"
    assert main(["plan-memory", *given.split(), "24"]) == 1
    shown = capsys.readouterr().out
    assert "2 GPUs of 24.00 GiB, one a rank" in shown
    control, generator = shown.split("rank 1: generator")
    assert "rank 0: control\n" in control
    assert "does not fit 24.00 GiB: " in control
    assert "fits 24.00 GiB: " in generator
    parts = report(f"{given} 24", capsys)["ranks"]
    assert [part["fits"] for part in parts] == [False, True]


def test_on_gpus_what_a_stream_runs_in_there_is_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "--model krea-14b --plan pp1 --tp 4"
    planned = report(f"{given} --gpu rtx-4090", capsys)
    assert (planned["dtype"], {part["fits"] for part in planned["ranks"]}) == ("bfloat16", {True})
    assert report(given, capsys)["dtype"] == "float32"


def test_advice_gives_the_control_rank_a_gpu_of_its_own_where_that_is_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "--model krea-14b --dtype bfloat16"
    whole, generator = (
        report(f"{given} --plan {plan}", capsys)["ranks"][-1]["total_bytes"]
        for plan in ("single", "pp0")
    )
    room = f"{given} --gpu-gib {(whole + generator) / 2 / 2**30}"
    assert "--plan pp0" in report(room, capsys)["changes"]
    assert report(f"{room} --plan pp0", capsys)["fits"] is True


def test_the_embedded_models_control_rank_holds_what_is_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    control = lines(report("--model tiny --plan pp0", capsys)["ranks"][0])
    folder = ModelFolder.open(EMBEDDED)
    codec, text_encoder = folder.codec(), folder.text_encoder()
    assert isinstance(codec, torch.nn.Module)
    assert isinstance(text_encoder, torch.nn.Module)
    assert control["text encoder"] == sum(p.nbytes for p in text_encoder.parameters())
    assert control["autoencoder"] == sum(p.nbytes for p in codec.parameters())
    latents_BFCHW = torch.zeros(1, 3, 16, 8, 8)
    with LiveBytes([*codec.parameters(), latents_BFCHW]) as live:
        codec.streaming_decoder().decode(latents_BFCHW)
    assert control["decoder memory"] == latents_BFCHW[:, -1].nbytes
    needed = control["decoder memory"] + control["decode workspace"]
    assert live.peak == pytest.approx(needed, rel=0.02)


def test_wans_autoencoder_needs_what_is_planned_for_decoding() -> None:
    preset = PRESETS["wan-14b"]
    assert isinstance(preset, VideoModel)
    from diffusers import AutoencoderKLWan  # seconds, for this test alone

    with torch.device("meta"):  # bytes are counted, and nothing is computed
        codec, autoencoder = preset.control.codec, AutoencoderKLWan().eval()
    assert codec is not None
    assert preset.control.autoencoder == sum(p.numel() for p in autoencoder.parameters())
    height, width = 64, 96
    latents = torch.zeros(1, 16, 3, height // 8, width // 8, device="meta")
    memory = list[int]()
    clear = autoencoder.clear_cache

    def note_and_clear() -> None:
        kept = [part for part in vars(autoencoder).get("_feat_map", ()) if torch.is_tensor(part)]
        memory.append(sum(part.nbytes for part in kept))
        clear()

    autoencoder.clear_cache = note_and_clear
    with torch.inference_mode(), LiveBytes([*autoencoder.parameters(), latents]) as live:
        autoencoder.decode(latents)
    assert max(memory) == codec.memory * height * width * WIDTH
    needed = (codec.memory + codec.workspace) * height * width * WIDTH
    assert live.peak == pytest.approx(needed, rel=0.02)


def test_a_start_frame_is_encoded_in_less_than_is_planned_for_decoding() -> None:
    from diffusers import AutoencoderKLWan

    preset = PRESETS["wan-1.3b"]
    assert isinstance(preset, VideoModel)
    codec = preset.control.codec
    assert codec is not None
    height, width = 64, 96
    with torch.device("meta"):  # as above
        autoencoder = AutoencoderKLWan().eval()
        picture = torch.zeros(1, 3, 1, height, width)
    with torch.inference_mode(), LiveBytes([*autoencoder.parameters(), picture]) as live:
        autoencoder.encode(picture)
    planned = (codec.memory + codec.workspace) * height * width * WIDTH
    assert 0.1 * planned < live.peak < planned


def test_a_folder_with_weights_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(UserInputError, match="copy the file again"):
        num_weights_in(tmp_path)


def test_weights_are_counted_in_every_format_and_those_of_variants_once(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(2, 3), "b": torch.zeros(5)}
    for name in ("model.safetensors", "model.fp16.safetensors"):
        save_file(weights, tmp_path / name)
    assert num_weights_in(tmp_path) == 11
    (tmp_path / "small").mkdir()
    torch.save(weights, tmp_path / "small" / "taew2_1.pth")
    assert num_weights_in(tmp_path / "small") == 11
    assert num_weights_in(tmp_path / "small" / "taew2_1.pth") == 11


@pytest.mark.parametrize("model", [SELF_FORCING, SELF_FORCING / "checkpoints/self_forcing_dmd.pt"])
def test_a_checkpoint_is_planned_by_the_recipe_that_is_asked_for(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family = Family.named("self-forcing-1.3b")
    recipe = replace(family.recipe, window_frames=6)
    (tmp_path / "mine.toml").write_text(replace(family, recipe=recipe, project=None).to_toml())
    printed = report(f"--model {model} --recipe {tmp_path / 'mine.toml'}", capsys)
    (rank,) = printed["ranks"]
    opened = ModelFolder.open(model)
    assert lines(rank)["weights"] == WIDTH * sum(
        tensor.num_bytes // tensor.dtype.itemsize for tensor in opened.weights.tensors.values()
    )
    assert lines(rank)["autoencoder"] == WIDTH * num_weights_in(opened.layout.vae) > 0
    assert lines(rank)["text encoder"] == WIDTH * num_weights_in(opened.layout.text_encoder) > 0
    assert "6 latent frames" in printed["title"]
