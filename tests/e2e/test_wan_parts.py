"""A folder with Wan's VAE and text encoder streams as it is, and resumes after all is lost."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.models.loading import ModelFolder
from scope_rt.models.recipe import Recipe
from scope_rt.session import StreamSession
from tests.real_checkpoints import FASTVIDEO, NEEDS_WAN
from tests.tiny_folder import KREA_RECIPE, RECIPE, write_tiny_folder

pytestmark = NEEDS_WAN

FIRST, SECOND = "A small red fox &amp; the snow.", "The fox runs away."
NUM_CHUNKS, LOST_AFTER = 17, 15
"""The decoder needs the 13 chunks before the one that is resumed, and not all of them."""
NEW_PROMPT = ScheduledEvent(chunk_index=4, prompt=SECOND)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(RECIPE, id="clean_pass"),
        pytest.param(KREA_RECIPE, id="recompute", marks=pytest.mark.lab),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe: Recipe = request.param
    folder = write_tiny_folder(tmp_path_factory.mktemp("model"), recipe)
    for part in ("vae", "text_encoder", "tokenizer"):
        shutil.rmtree(folder / part, ignore_errors=True)
        shutil.copytree(FASTVIDEO / part, folder / part)
    return folder


def config(folder: Path, place: Path, **settings: Any) -> StreamConfig:
    kept = {"seed": 5, "log": place / "log", "snapshot": place / "snapshot"}
    return StreamConfig.of(folder, **kept, **settings)


def whole(folder: Path, place: Path, *events: ScheduledEvent) -> list[Chunk]:
    with StreamSession(config(folder, place)) as session:
        return list(session.stream(FIRST, num_chunks=NUM_CHUNKS, schedule=(NEW_PROMPT, *events)))


def same(got: Sequence[Chunk], want: Sequence[Chunk]) -> bool:
    return len(got) == len(want) and all(
        torch.equal(mine.latents, other.latents)
        and torch.equal(torch.as_tensor(mine.frames), torch.as_tensor(other.frames))
        for mine, other in zip(got, want, strict=True)
    )


def test_a_resumed_stream_shows_the_pictures_of_one_that_rebuilds_its_cache_there(
    folder: Path, tmp_path: Path
) -> None:
    rebuild = ScheduledEvent(chunk_index=LOST_AFTER, recompute=True)
    want = whole(folder, tmp_path / "whole", rebuild)
    assert [len(chunk.frames) for chunk in want[:2]] == [9, 12]
    with StreamSession(config(folder, tmp_path / "lost")) as session:
        shown: list[Chunk] = []
        stream = session.stream(
            FIRST, num_chunks=NUM_CHUNKS, schedule=(NEW_PROMPT,), acknowledged=lambda: len(shown)
        )
        for _ in range(LOST_AFTER):
            shown.append(next(stream))
        session.log.close()
    with StreamSession(config(folder, tmp_path / "lost", resume=True)) as session:
        rest = list(session.stream("none", num_chunks=NUM_CHUNKS, acknowledged=lambda: LOST_AFTER))
    assert same(shown + rest, want)


def test_conditioning_is_the_text_encoder_s_and_its_geometry_is_known_without_it(
    folder: Path,
) -> None:
    model = ModelFolder.open(folder)
    encoder = model.text_encoder()
    geometry = model.geometry(dtype=torch.float32)
    assert encoder([FIRST]).shape[1:] == (geometry.text_len, geometry.text_dim) == (512, 64)
    assert torch.equal(encoder([FIRST]), encoder(["A small  red fox & the snow. "]))
