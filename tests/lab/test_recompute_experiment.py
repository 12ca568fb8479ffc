import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from einops import rearrange

from scope_contracts.errors import ScopeError
from scope_lab import recompute_experiment
from scope_lab.main import main as lab
from scope_lab.recompute_experiment import (
    run,
    variant_speed,
    variants_of,
)
from scope_lab.recompute_quality import Frames, Quality, judge_stream
from scope_lab.recompute_report import (
    Change,
    Experiment,
    Row,
    Sample,
    Variant,
    table,
    verdicts,
)
from scope_lab.tiny.world import CHUNK_FRAMES, simulate
from scope_rt.control.recompute import RecomputeMode
from scope_rt.models.loading import ModelFolder
from scope_rt.models.recipe import Recipe
from scope_rt.text.words import parse
from scope_runners.break_it.driver import recompute_recipe
from tests.tiny_folder import RECIPE, write_tiny_folder

NUM_CHUNKS = 5
SCENE = parse("a red circle, fast, on navy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def experiment(folder: Path) -> Experiment:
    return run(folder, num_prompts=2, num_chunks=NUM_CHUNKS, plans=[], rounds=1)


def filmed(scene_text: str) -> list[Frames]:
    """The world itself, four chunks of it."""
    scene = parse(scene_text)
    video = simulate([[scene] * 4], torch.Generator().manual_seed(0))
    frames = ((video[0] + 1) * 127.5).round().to(torch.uint8)
    chunks = rearrange(frames, "(k t) c h w -> k t h w c", t=CHUNK_FRAMES)
    return [chunk.numpy() for chunk in chunks]


def judged(chunks: list[Frames]) -> Quality:
    return judge_stream(chunks, SCENE, reference=chunks)


def test_every_variant_makes_exactly_the_generator_calls_it_stands_for(
    experiment: Experiment,
) -> None:
    steps = len(RECIPE.denoising_steps)
    calls = {
        (row.variant.context_frames, str(row.variant)): {s.generator_calls for s in row.samples}
        for row in experiment.rows
    }
    block = RECIPE.frames_per_block
    assert calls == {
        (0, "clean pass"): {steps + 1},
        (2 * block, "every 1 decoded (R0a)"): {steps + 1},
        (2 * block, "every 1 latent (R0)"): {steps + 1},
        (2 * block, "every 2 decoded (R0a)"): {steps + 0.5},
        (2 * block, "every 3 decoded (R0a)"): {steps + 0.25},
        (2 * block, "never (R1)"): {steps},
        (block, "every 1 decoded (R0a)"): {steps + 1},
        (block, "every 2 decoded (R0a)"): {steps + 0.5},
    }


def test_the_first_variant_is_what_all_are_compared_with(experiment: Experiment) -> None:
    first, *others = experiment.rows
    assert all(math.isinf(sample.quality.psnr_db) for sample in first.samples)
    assert any(math.isfinite(s.quality.psnr_db) for row in others for s in row.samples)


def test_a_recompute_model_is_run_under_its_own_recipe(folder: Path) -> None:
    own = recompute_recipe(RECIPE, 2)
    assert {variant.context_frames for variant in variants_of(own)} == {2}


def test_a_recompute_recipe_holds_context_and_chunk_and_nothing_else(tmp_path: Path) -> None:
    recipe = recompute_recipe(replace(RECIPE, sink_frames=1), 6)
    recipe.save(tmp_path)
    assert Recipe.from_folder(tmp_path) == recipe
    assert (recipe.window_frames, recipe.sink_frames) == (9, 0)


def test_the_world_itself_moves_as_named_and_does_not_flicker() -> None:
    quality = judged(filmed("a red circle, fast, on navy"))
    assert quality.motion == pytest.approx(1, abs=0.05)
    assert quality.flicker == pytest.approx(1, abs=0.2)
    assert (quality.colours, quality.shapes) == (1, 1)


def test_half_the_named_speed_is_half_the_motion() -> None:
    assert judged(filmed("a red circle, medium, on navy")).motion == pytest.approx(0.5, abs=0.05)


def test_a_jump_at_every_chunk_border_is_flicker() -> None:
    smooth = filmed("a red circle, fast, on navy")
    jumping = [np.roll(chunk, 16 * (index % 2), axis=2) for index, chunk in enumerate(smooth)]
    assert judged(jumping).flicker > 2 * judged(smooth).flicker


def test_flicker_and_motion_of_a_still_video_are_undefined() -> None:
    still = [np.zeros((CHUNK_FRAMES, 64, 64, 3), np.uint8)] * 2
    quality = judged(still)
    assert math.isnan(quality.flicker)
    assert math.isnan(quality.motion)


@pytest.mark.parametrize(
    ("differences", "is_clear"),
    [
        ([-0.1, -0.1, -0.1], True),
        ([-0.1, -0.12, -0.09, -0.11], True),
        ([-0.1, 0.12, -0.09, 0.11], False),
        ([0.0, 0.0, 0.0], False),
        ([-0.5], False),
        ([-0.5, math.nan], False),
        ([], False),
    ],
)
def test_a_change_is_clear_beyond_its_noise_only(differences: list[float], is_clear: bool) -> None:
    assert Change.of(differences).is_clear is is_clear


def row_of(every: int, *, flickers: list[float], speeds: list[float]) -> Row:
    samples = [
        Sample(
            quality=Quality(colours=1, shapes=1, motion=0.8, flicker=flicker, psnr_db=20),
            generator_calls=5,
            generate_ms=60,
            frames_per_s=speed,
        )
        for flicker, speed in zip(flickers, speeds, strict=True)
    ]
    variant = Variant(context_frames=6, mode=RecomputeMode.R0A, every=every)
    return Row(variant=variant, samples=tuple(samples), plans={})


def test_a_verdict_distinguishes_loss_from_gain() -> None:
    before = row_of(1, flickers=[1.8, 1.9, 1.7], speeds=[100, 80, 120])
    worse_not_faster = row_of(2, flickers=[2.3, 2.4, 2.3], speeds=[101, 79, 121])
    faster_not_worse = row_of(2, flickers=[1.8, 1.9, 1.7], speeds=[110, 88, 133])
    (loss,) = verdicts(Experiment(num_chunks=14, rows=(before, worse_not_faster)))
    (gain,) = verdicts(Experiment(num_chunks=14, rows=(before, faster_not_worse)))
    assert (loss.loses_quality, loss.gains_speed) == (True, False)
    assert (gain.loses_quality, gain.gains_speed) == (False, True)
    assert "loses quality" in loss.sentence()
    assert "gains speed" in gain.sentence()


def test_the_table_has_a_line_for_every_variant(experiment: Experiment) -> None:
    lines = [line for line in table(experiment).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(experiment.rows)
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.lab
def test_a_plan_is_timed_under_the_variant(folder: Path) -> None:
    assert variant_speed(Variant(), folder, "pp1", 1) > 0


@pytest.mark.lab
def test_a_plan_that_does_not_run_ends_the_experiment(folder: Path) -> None:
    unfit = Variant(context_frames=3, mode=RecomputeMode.R0A, every=2)
    assert ModelFolder.open(folder).recipe.clean_pass
    with pytest.raises(ScopeError, match="--plans pp1 --tp 1"):
        variant_speed(unfit, folder, "pp1", 1)


def test_json_holds_every_variant_and_the_verdicts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute_experiment, "QUICK_PROMPTS", 1)
    monkeypatch.setattr(recompute_experiment, "QUICK_CHUNKS", 2)
    assert lab(["recompute_experiment", "--model", str(folder), "--quick", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["rows"]) == len(variants_of(RECIPE))
    assert [each["context_frames"] for each in printed["every_2_instead_of_1"]] == [6, 3]
