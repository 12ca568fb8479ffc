"""A codec and a text encoder that are ordinary modules stream, in the length that was asked for."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scope_contracts.errors import UserInputError
from scope_rt.models.recipe import Recipe
from scope_rt.models.registry import CODECS, TEXT_ENCODERS, register_codec, register_text_encoder
from scope_rt.session import StreamSession
from scope_runners.job import StreamJob, prepare
from scope_runners.request import parse_stream_request
from tests.tiny_folder import KREA_RECIPE, RECIPE, write_tiny_folder
from tests.vae.parameter_codec import SIZES, ParameterCodec


class ParameterTextEncoder(nn.Module):
    """A vector for every letter of a prompt."""

    text_len, text_dim = 6, 64

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(7, self.text_dim)

    def forward(self, prompts: Sequence[str]) -> Tensor:
        padded = [prompt.ljust(self.text_len)[: self.text_len] for prompt in prompts]
        return self.letters(torch.tensor([[ord(c) % 7 for c in prompt] for prompt in padded]))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers ends with it."""
    for registry in (CODECS, TEXT_ENCODERS):
        monkeypatch.setattr(registry, "_loaders", dict(registry._loaders))
    register_text_encoder("ParameterTextEncoder", lambda _: ParameterTextEncoder())


def job_of(folder: Path, recipe: Recipe, *arguments: str) -> StreamJob:
    written = write_tiny_folder(folder, recipe)
    (written / "vae" / "config.json").write_text(
        json.dumps({"_class_name": "ParameterCodec"} | SIZES)
    )
    text = {"_class_name": "ParameterTextEncoder", "text_len": 6, "text_dim": 64}
    (written / "text_encoder" / "config.json").write_text(json.dumps(text))
    inputs = ["--prompt", "a", "--model", str(written), "--out", str(folder / "a.mp4")]
    return prepare(parse_stream_request([*inputs, *arguments]))


@pytest.mark.parametrize("recipe", [RECIPE, KREA_RECIPE], ids=["clean_pass", "recompute"])
def test_a_stream_is_as_long_as_asked_and_its_cut_is_in_time(
    tmp_path: Path, recipe: Recipe
) -> None:
    register_codec("ParameterCodec", lambda _: ParameterCodec())
    job = job_of(tmp_path, recipe, "--seconds", "4", "--hard-cut-at", "3", "--prompt-at", "1:b")
    timeline = job.timeline
    with StreamSession(job.setup) as session:
        chunks = list(session.stream("a", num_chunks=timeline.num_chunks, schedule=timeline.events))
    assert [len(chunk.frames) for chunk in chunks] == [9, 12, 12, 12, 12, 9]
    assert [chunk.cache_epoch for chunk in chunks] == [0, 0, 0, 0, 0, 1]
    assert [chunk.prompt for chunk in chunks] == ["a", "a", "b", "b", "b", "b"]
    assert timeline.num_frames == 66 >= 4 * recipe.fps > 66 - 9


def test_embeddings_carry_no_graph(tmp_path: Path) -> None:
    register_codec("ParameterCodec", lambda _: ParameterCodec())
    assert not job_of(tmp_path, RECIPE).setup.conditioning("a").embeds.requires_grad


def test_a_codec_that_gives_other_frames_is_refused_at_the_start(tmp_path: Path) -> None:
    register_codec("ParameterCodec", lambda _: ParameterCodec(lambda frames: frames[:, :-1]))
    job = job_of(tmp_path, RECIPE)
    with pytest.raises(UserInputError, match="codec ParameterCodec: what decode gives: got"):
        StreamSession(job.setup)


def test_a_codec_that_gives_other_frames_ends_a_stream_that_verifies_nothing(
    tmp_path: Path,
) -> None:
    register_codec("ParameterCodec", lambda _: ParameterCodec(lambda frames: frames[:, :-1]))
    job = job_of(tmp_path, RECIPE, "--integrity", "off")
    with StreamSession(job.setup) as session:
        stream = session.stream("a", num_chunks=1)
        with pytest.raises(UserInputError, match=r"codec ParameterCodec: .*\[1, 8, 16, 32, 3\]"):
            next(stream)
