import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from einops import rearrange
from numpy.typing import NDArray
from safetensors.torch import load_file

from scope_contracts.errors import UserInputError
from scope_lab.main import main as lab
from scope_lab.tiny import evaluate
from scope_lab.tiny.assemble import RECIPE, assemble
from scope_lab.tiny.make_clips import make_clips
from scope_lab.tiny.verdicts import (
    LONG_CHUNKS,
    SHORT_CHUNKS,
    ChunkVerdict,
    StreamVerdict,
    change_figures,
    judge,
    long_figures,
    psnr_db,
    short_figures,
    table,
)
from scope_lab.tiny.world import simulate
from scope_rt.models.loading import embedded_folder
from scope_rt.text.words import WordTextEncoder, parse
from scope_rt.vae.tiny import TinyCodecConfig, TinyVideoCodec

RIGHT = ChunkVerdict(colours=(True, True), shapes=(True, True), background=True, nothing_else=True)
HALF = replace(RIGHT, shapes=(True, False))
WRONG = ChunkVerdict(
    colours=(True, False), shapes=(False, False), background=False, nothing_else=False
)


def picture(prompt: str) -> NDArray[np.uint8]:
    video = simulate([[parse(prompt)]], torch.Generator().manual_seed(0))[0]
    pixels = ((video + 1) * 127.5).round().to(torch.uint8)
    return np.ascontiguousarray(rearrange(pixels, "t c h w -> t h w c").numpy())


def test_the_world_itself_is_judged_right() -> None:
    for prompt in ("a red circle and a blue square on navy", "a white triangle, fast, on gray"):
        verdict = judge(picture(prompt), parse(prompt))
        assert verdict.all_shapes
        assert verdict.background
        assert verdict.nothing_else


def test_only_the_object_that_differs_is_judged_wrong() -> None:
    shown = picture("a red circle and a blue square on navy")
    other_shape = judge(shown, parse("a red circle and a blue triangle on black"))
    assert (other_shape.colours, other_shape.shapes) == ((True, True), (True, False))
    assert not other_shape.background
    other_colour = judge(shown, parse("a red circle and a green square on navy"))
    assert (other_colour.colours, other_colour.shapes) == ((True, False), (True, False))
    assert not other_colour.nothing_else


def test_psnr_of_a_constant_error_is_known() -> None:
    dark = np.zeros((2, 3, 3, 3), dtype=np.uint8)
    assert psnr_db(dark, dark + np.uint8(51)) == pytest.approx(20 * math.log10(5))


def test_shares_count_chunks_and_objects() -> None:
    stream = StreamVerdict(steady=(RIGHT, RIGHT, HALF, WRONG))
    values = {figure.key: figure.value for figure in short_figures([stream])}
    assert values["colours_10s"] == 75
    assert values["shapes_10s"] == 50
    assert values["object_shapes_10s"] == 62.5
    assert values["object_colours_10s"] == 87.5
    assert values["backgrounds_10s"] == values["nothing_else_10s"] == 75


def test_a_stream_that_decays_misses_the_target_at_60_s() -> None:
    decayed = (RIGHT,) * (LONG_CHUNKS - SHORT_CHUNKS) + (WRONG,) * SHORT_CHUNKS
    short = StreamVerdict(steady=(WRONG,) * SHORT_CHUNKS)
    figures = {f.key: f for f in long_figures([StreamVerdict(steady=decayed), short])}
    assert figures["colours_50s_60s_change"].value == -100
    assert figures["colours_50s_60s_change"].missed
    assert figures["shapes_60s_change"].value == pytest.approx(-17.5)
    steady = {f.key: f for f in long_figures([StreamVerdict(steady=(RIGHT,) * LONG_CHUNKS)])}
    assert not any(figure.missed for figure in steady.values())


def test_a_late_or_missing_object_is_not_within_two_chunks() -> None:
    views = [(WRONG, RIGHT), (WRONG, HALF, RIGHT), (WRONG, WRONG)]
    streams = [StreamVerdict(steady=(), after_hard_cut=view, after_prompt=view) for view in views]
    figures = {figure.key: figure for figure in change_figures(streams)}
    assert figures["hard_cut_objects_within_2"].value == pytest.approx(100 / 3)
    assert figures["hard_cut_objects_within_2"].missed
    assert figures["hard_cut_colours_within_2"].value == pytest.approx(200 / 3)
    assert figures["hard_cut_objects_median"].value == 3
    assert figures["prompt_objects_within_2"].target is None
    printed = table(list(figures.values()))
    assert "within 2 chunks | 33.3 % | ≥ 75 % **missed** |" in printed
    assert "never" not in printed
    lost = change_figures([StreamVerdict(steady=(), after_hard_cut=(WRONG,))])
    assert "median, counted from 1 | never |" in table(lost)


def test_trials_share_no_colour_and_shorter_runs_are_the_start_of_longer_ones() -> None:
    trials = evaluate.draw_trials(20, num_long=3, changes=True)
    for trial in trials:
        colours = [thing.colour for p in trial.prompts for thing in parse(p).objects]
        assert len(set(colours)) == len(colours)
    assert [t.steady_chunks for t in trials[:5]] == [LONG_CHUNKS] * 3 + [SHORT_CHUNKS] * 2
    quick = evaluate.draw_trials(2, num_long=0, changes=False)
    assert [t.prompts[0] for t in quick] == [t.prompts[0] for t in trials[:2]]
    assert [t.num_chunks for t in quick] == [SHORT_CHUNKS] * 2


@pytest.mark.lab
def test_a_watched_stream_changes_where_the_trial_says(tmp_path: Path) -> None:
    trial = replace(evaluate.draw_trials(1, num_long=0, changes=True)[0], steady_chunks=2)
    stream, samples = evaluate.watch("tiny", trial)
    assert len(stream.steady) == 2
    assert len(stream.after_hard_cut) == evaluate.HARD_CUT_CHUNKS
    assert len(stream.after_prompt) == evaluate.PROMPT_CHUNKS
    evaluate.write_samples(tmp_path, 0, trial, samples)
    assert (tmp_path / "000.png").stat().st_size > 0
    assert f"from chunk 2: {trial.prompts[1]}" in (tmp_path / "000.txt").read_text()


def test_a_missing_model_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lab(["eval_tiny", "--model", "/nowhere", "--quick"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_interrupted_shard_run_resumes_with_the_same_clips(tmp_path: Path) -> None:
    codec, text_encoder = TinyVideoCodec(TinyCodecConfig()), WordTextEncoder.from_seed(0)

    def shards(name: str, *counts: int) -> list[dict[str, torch.Tensor]]:
        for count in counts:
            make_clips(
                tmp_path / name,
                codec=codec,
                text_encoder=text_encoder,
                num_shards=count,
                seed=1,
                clips_per_shard=32,
            )
        return [load_file(path) for path in sorted((tmp_path / name).iterdir())]

    at_once, resumed = shards("at_once", 2), shards("resumed", 1, 2)
    assert at_once[0]["latents"].shape == (32, 12, 16, 8, 8)
    assert at_once[0]["text"].shape == (32, 4, 6, 64)
    for one, other in zip(at_once, resumed, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in ("latents", "text"))
    assert not torch.equal(at_once[0]["text"], at_once[1]["text"])


def test_the_assembled_folder_opens_and_has_the_embedded_recipe(tmp_path: Path) -> None:
    embedded = embedded_folder()
    model = assemble(
        tmp_path / "model",
        codec=embedded / "vae",
        transformer=embedded / "transformer",
        text_encoder=WordTextEncoder.from_seed(0),
    )
    assert model.recipe == RECIPE
    assert model.fingerprint()


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"transformer.*train that part first"):
        assemble(
            tmp_path / "model",
            codec=embedded_folder() / "vae",
            transformer=tmp_path / "transformer",
            text_encoder=WordTextEncoder.from_seed(0),
        )


def test_training_without_clips_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab(["train_tiny", "--out", str(tmp_path), "--stage", "dit"]) == 2
    assert "run --stage clips first" in capsys.readouterr().err
