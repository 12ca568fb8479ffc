"""A codec or text encoder of one's own is found by its class; nothing is replaced silently."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.config import StreamConfig
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.models import registry
from scope_rt.models.loading import ModelFolder
from scope_rt.models.registry import Registry, register_codec, register_text_encoder
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_rt.text.encoder import TextEncoder, TextSizes
from scope_rt.text.words import WordTextEncoder
from scope_rt.vae.codec import CodecSizes, VideoCodec
from scope_rt.vae.tiny import TinyVideoCodec
from tests.tiny_folder import write_tiny_folder

SIZES = {
    "latent_channels": 16,
    "spatial_stride": 8,
    "temporal_stride": 4,
    "first_latent_frames": 4,
    "decoder_context_frames": 1,
}


@pytest.fixture(autouse=True)
def _own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers ends with it."""
    codecs = Registry[VideoCodec, CodecSizes]("codec", CodecSizes)
    codecs.register(
        "TinyVideoCodec",
        lambda folder, place: TinyVideoCodec.from_pretrained(folder),
        TinyVideoCodec.sizes,
        check=None,
    )
    texts = Registry[TextEncoder, TextSizes]("text encoder", TextSizes)
    for module in ("registry", "loading"):
        monkeypatch.setattr(f"scope_rt.models.{module}.CODECS", codecs)
        monkeypatch.setattr(f"scope_rt.models.{module}.TEXT_ENCODERS", texts)


class LettersTextEncoder:
    """The letters of a prompt, as numbers."""

    text_len, text_dim = 6, 64

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        rows = torch.zeros(len(prompts), self.text_len, self.text_dim)
        for row, prompt in zip(rows, prompts, strict=True):
            letters = torch.tensor([ord(letter) % 7 for letter in prompt[: row.numel()]])
            row.view(-1)[: len(letters)] = letters.float()
        return rows


def rename_class(folder: Path, name: str, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": name} | entries))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder whose codec and text encoder are of classes nobody knows yet."""
    written = write_tiny_folder(tmp_path / "model")
    rename_class(written / "vae", "MyCodec", **SIZES)
    rename_class(written / "text_encoder", "Letters")
    return written


def test_a_session_streams_with_a_registered_codec_and_text_encoder(folder: Path) -> None:
    register_codec("MyCodec", TinyVideoCodec.from_pretrained)
    register_text_encoder("Letters", lambda folder: LettersTextEncoder())
    with StreamSession(StreamConfig.of(folder)) as session:
        (chunk,) = session.stream("anything at all", num_chunks=1)
    assert chunk.frames.shape == (12, 16, 32, 3)


def test_a_class_that_nobody_registered_is_refused_by_name(folder: Path) -> None:
    model = ModelFolder.open(folder)
    with pytest.raises(UserInputError, match=r"'MyCodec', only for TinyVideoCodec; .*--parts"):
        model.codec()
    with pytest.raises(UserInputError, match=r"'Letters', .*register_text_encoder"):
        model.text_sizes()


def test_a_name_is_given_once() -> None:
    with pytest.raises(UserInputError, match="codec 'TinyVideoCodec' is registered already"):
        register_codec("TinyVideoCodec", TinyVideoCodec.from_pretrained)
    register_text_encoder("Letters", lambda folder: LettersTextEncoder())
    with pytest.raises(UserInputError, match="text encoder 'Letters' is registered already"):
        register_text_encoder("Letters", lambda folder: LettersTextEncoder())


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [None, "8", 8.0, True, -1])
def test_a_size_that_config_json_does_not_give_is_named(
    folder: Path, name: str, value: object
) -> None:
    register_codec("MyCodec", TinyVideoCodec.from_pretrained)
    rename_class(folder / "vae", "MyCodec", **{name: value})
    with pytest.raises(UserInputError, match=rf"{name}: got .* want a whole number, at least"):
        ModelFolder.open(folder).codec_sizes()


@pytest.mark.parametrize("name", ["temporal_stride", "decoder_context_frames"])
def test_a_codec_of_other_sizes_than_every_rank_was_told_is_refused(
    folder: Path, name: str
) -> None:
    register_codec("MyCodec", TinyVideoCodec.from_pretrained)
    rename_class(folder / "vae", "MyCodec", **{name: SIZES[name] + 1})
    with pytest.raises(UserInputError, match=rf"{name}: got {SIZES[name]}, want"):
        ModelFolder.open(folder).codec()


def test_sizes_may_come_from_a_function(folder: Path) -> None:
    told = CodecSizes(**SIZES)
    rename_class(folder / "vae", "MyCodec", temporal_stride="see the paper")
    register_codec("MyCodec", TinyVideoCodec.from_pretrained, sizes=lambda folder: told)
    assert ModelFolder.open(folder).codec_sizes() == told
    assert ModelFolder.open(folder).codec().temporal_stride == 4


def test_who_only_starts_ranks_loads_no_part_of_ones_own(folder: Path) -> None:
    loaded = list[str]()

    def codec(part: Path) -> TinyVideoCodec:
        loaded.append(part.name)
        return TinyVideoCodec.from_pretrained(part)

    def letters(part: Path) -> LettersTextEncoder:
        loaded.append(part.name)
        return LettersTextEncoder()

    register_codec("MyCodec", codec)
    register_text_encoder("Letters", letters)
    config = StreamConfig.of(folder, plan="pp1")
    launcher = StreamSetup.of(config, LaunchEnvironment())
    launcher.check_prompt("anything at all")
    with pytest.raises(UserInputError, match="want at most"):
        launcher.check_prompt("x" * 10**6)
    assert loaded == []
    for rank, parts in ((0, ["vae", "text_encoder"]), (1, [])):
        loaded.clear()
        StreamSetup.of(config, LaunchEnvironment(launched=True, rank=rank, world_size=2))
        assert loaded == parts, rank


def test_who_only_starts_ranks_refuses_prompts_that_a_small_encoder_cannot_read(
    tmp_path: Path,
) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    registry.TEXT_ENCODERS.register(
        "WordTextEncoder", lambda part, place: WordTextEncoder.from_pretrained(part), check=None
    )
    launcher = StreamSetup.of(StreamConfig.of(folder, plan="pp1"), LaunchEnvironment())
    with pytest.raises(UserInputError, match="unknown word"):
        launcher.check_prompt("anything at all")


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    (folder / "vae" / "config.json").write_text(text)
    with pytest.raises(UserInputError, match=r"vae/config\.json"):
        ModelFolder.open(folder).codec_sizes()
