"""What a guide tells a reader to save and to run does what the guide says."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from scope_rt.models import registry
from scope_rt.models.recipe import Recipe
from scope_rt.models.recipe_checks import OPTIONAL
from scope_rt.models.registry import Registry
from scope_rt.text.encoder import TextSizes
from scope_rt.vae.codec import CodecSizes
from tests.guides.blocks import GUIDES, TIMEOUT_S, commands, run, save_files


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_model_with_parts_of_ones_own_streams_as_its_guide_says(tmp_path: Path) -> None:
    guide = GUIDES / "your-own-model.md"
    save_files(guide, tmp_path)
    made, *streamed = [run(line, tmp_path) for line in commands(guide) if "scope-rt" not in line]
    assert not made
    assert len(streamed) == 2
    for printed in streamed:
        assert printed.splitlines() == [f"{index} (12, 64, 64, 3) uint8" for index in range(3)]
    entries = json.loads((tmp_path / "my-model" / "recipe.json").read_text())
    assert set(entries) == set(Recipe.__slots__) - OPTIONAL | {"latent_limit"}


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_every_command_takes_the_parts_of_ones_own_as_the_guide_says(tmp_path: Path) -> None:
    guide = GUIDES / "your-own-model.md"
    save_files(guide, tmp_path)
    run("python make_folder.py", tmp_path)
    with pytest.raises(AssertionError, match=r"^.*\nmy-model is there already; delete it.*$"):
        run("python make_folder.py", tmp_path)
    lines = [line for line in commands(guide) if line.startswith("scope-rt")]
    assert [line.split()[1] for line in lines] == ["stream", "replay", "plan-memory", "break-it"]
    for line in lines:
        assert run(line, tmp_path), line


def test_the_example_decoder_depends_on_as_many_latents_as_its_codec_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_files(GUIDES / "your-own-model.md", tmp_path)
    monkeypatch.setattr(registry, "CODECS", Registry("codec", CodecSizes))
    monkeypatch.setattr(registry, "TEXT_ENCODERS", Registry("text encoder", TextSizes))
    codec = runpy.run_path(str(tmp_path / "my_parts.py"))["MosaicCodec"]()
    latents = torch.randn(1, 6, 16, 2, 2, generator=torch.Generator().manual_seed(0))
    decoder = codec.streaming_decoder()
    whole = decoder.decode(latents)

    def shown_after(num_context: int) -> torch.Tensor:
        decoder.reset()
        for index in range(5 - num_context, 5):
            decoder.decode(latents[:, index : index + 1])
        shown: torch.Tensor = decoder.decode(latents[:, 5:])
        return shown

    assert torch.equal(shown_after(codec.decoder_context_frames), whole[:, -4:])
    assert not torch.equal(shown_after(codec.decoder_context_frames - 1), whole[:, -4:])


def test_the_example_program_takes_the_environment_and_ends_in_one_sentence(
    tmp_path: Path,
) -> None:
    save_files(GUIDES / "your-own-model.md", tmp_path)
    run("python make_folder.py", tmp_path)
    with pytest.raises(AssertionError) as failed:
        run("env SCOPE_DIGEST_EVERY=0 python stream.py", tmp_path)
    said = str(failed.value).splitlines()[1:]
    assert len(said) == 1, said
    assert said[0].startswith("stream.py: digest_every (SCOPE_DIGEST_EVERY)")
    with pytest.raises(AssertionError) as failed:
        run("torchrun --standalone --nproc-per-node 3 stream.py pp1", tmp_path)
    assert "stream.py: plan pp1 with tp 1 needs 2 processes, got 3" in str(failed.value)
    assert 'stream.py", line' not in str(failed.value), "a traceback of the program"


def test_the_guide_explains_every_entry_of_a_recipe() -> None:
    text = (GUIDES / "your-own-model.md").read_text()
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    explained = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert explained == set(Recipe.__slots__)
