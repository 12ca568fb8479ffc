"""A replay compares what can be made again, and says what cannot."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from scope_contracts.tensor_spec import DType
from scope_rt.config import StreamConfig
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.models.family import Family
from scope_rt.models.recipe import Recipe
from scope_rt.models.recipe_choices import NewText, RecomputeText
from scope_rt.session import StreamSession
from scope_runners import replay
from scope_runners.main import main
from tests.tiny_folder import KREA_RECIPE, RECIPE, write_tiny_folder

RESTART, NUM_CHUNKS = 3, 5
RECACHING = replace(RECIPE, new_text=NewText.RECACHE)
PREVIOUS = replace(KREA_RECIPE, recompute_text=RecomputeText.PREVIOUS)


def record_with_restart(folder: Path, *, new_text_at: int) -> Path:
    """The recording of a stream that was resumed at chunk `RESTART`."""
    event = ScheduledEvent(chunk_index=new_text_at, prompt="blue square")
    path = folder.parent / "r.scope"
    for resume in (None, True):
        snapshot = folder.parent / "snapshot"
        config = StreamConfig.of(
            folder, seed=3, resume=resume, log=path, snapshot=snapshot, record_latents=True
        )
        with StreamSession(config) as session:
            chunks = session.stream(
                "red circle", num_chunks=NUM_CHUNKS, schedule=[event], acknowledged=lambda: RESTART
            )
            for _ in range(RESTART if resume is None else NUM_CHUNKS - RESTART):
                next(chunks)
            session.log.close()
    return path


@pytest.mark.parametrize(
    ("recipe", "new_text_at", "compared"),
    [
        (RECIPE, RESTART, NUM_CHUNKS),
        (RECACHING, 1, RESTART),
        (PREVIOUS, RESTART, RESTART),
        (PREVIOUS, RESTART - 1, NUM_CHUNKS),
    ],
)
def test_what_followed_from_what_a_restart_lost_is_not_called_different(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recipe: Recipe,
    new_text_at: int,
    compared: int,
) -> None:
    folder = write_tiny_folder(tmp_path / "model", recipe)
    path = record_with_restart(folder, new_text_at=new_text_at)
    capsys.readouterr()
    assert main(["replay", str(path)]) == 0
    printed = capsys.readouterr()
    assert f"compared   {compared} chunks" in printed.out
    assert (f"made chunk {RESTART} after a restart" in printed.err) == (compared < NUM_CHUNKS)


def test_a_stream_with_a_recipe_of_its_own_is_replayed_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = write_tiny_folder(tmp_path / "model"), tmp_path / "a.scope"
    recipe = tmp_path / "mine.toml"
    recipe.write_text(Family(name="mine", recipe=replace(RECIPE, shift=8.0)).to_toml())
    config = StreamConfig.of(folder, recipe=str(recipe), log=path, record_latents=True)
    with StreamSession(config) as session:
        assert len(list(session.stream("red circle", num_chunks=2))) == 2
    other = tmp_path / "other.toml"
    other.write_text(Family(name="other", recipe=RECIPE).to_toml())
    assert main(["replay", str(path), "--recipe", str(other)]) == 2
    assert "--recipe where the stream was given one" in capsys.readouterr().err
    assert main(["replay", str(path)]) == 0
    moved = recipe.rename(tmp_path / "moved.toml")
    assert main(["replay", str(path)]) == 2
    assert "mine.toml" in capsys.readouterr().err
    assert main(["replay", str(path), "--recipe", str(moved)]) == 0


def test_codec_and_text_encoder_compute_in_a_replay_as_they_did(tmp_path: Path) -> None:
    folder, path = write_tiny_folder(tmp_path / "model"), tmp_path / "a.scope"
    dtypes = {"codec_dtype": DType.BFLOAT16, "text_dtype": DType.FLOAT16}
    config = StreamConfig.of(folder, log=path, record_latents=True, **dtypes)
    with StreamSession(config) as session:
        assert len(list(session.stream("red circle", num_chunks=2))) == 2
    asked = argparse.ArgumentParser()
    replay.add_replay_arguments(asked)
    job = replay.prepare(asked.parse_args([str(path)]), LaunchEnvironment())
    again = replay._config(job, None).model
    assert {"codec_dtype": again.codec_dtype, "text_dtype": again.text_dtype} == dtypes
