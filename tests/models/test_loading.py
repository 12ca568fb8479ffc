"""A model folder that cannot stream is refused when it is opened, in one sentence."""

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scope_contracts.errors import UserInputError
from scope_rt.config import StreamConfig
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.session import StreamSession
from tests import warm_python
from tests.tiny_folder import write_tiny_folder


def edit(name: str, **entries: object) -> Callable[[Path], None]:
    """Change entries of a JSON file of a model folder."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def drop(name: str, entry: str) -> Callable[[Path], None]:
    """Remove an entry of a JSON file of a model folder."""

    def change(folder: Path) -> None:
        path = folder / name
        entries = json.loads(path.read_text())
        del entries[entry]
        path.write_text(json.dumps(entries))

    return change


def truncate(name: str) -> Callable[[Path], None]:
    """Cut a file in half, as a broken copy does."""

    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return change


WEIGHTS = "diffusion_pytorch_model.safetensors"


def leave_pointer_of_lfs(folder: Path) -> None:
    """Weights as a clone without Git LFS has them."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
    (folder / "transformer" / WEIGHTS).write_text(pointer)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (edit("recipe.json", cache_upkeep="magic"), "cache_upkeep is 'magic'"),
        (edit("recipe.json", window_frames=2), "window_frames is 2"),
        (edit("recipe.json", denoising_steps=[500, 750]), "denoising_steps is .* falling"),
        (edit("recipe.json", surprise=1), r"recipe.json: unknown entries: surprise; "),
        (drop("recipe.json", "fps"), r"recipe.json: missing entries: fps; "),
        (edit("transformer/config.json", num_layers=3), r"json: \d+ missing, 'blocks\.2\."),
        (edit("transformer/config.json", num_layers=1), r"json: \d+ unexpected, 'blocks\.1\."),
        (edit("transformer/config.json", qk_norm=None), "qk_norm is None"),
        (edit("transformer/config.json", num_layers="2"), "num_layers is '2', want a whole"),
        (edit("transformer/config.json", eps=0), "eps is 0, want a number above 0"),
        (
            edit("transformer/config.json", in_channels=8, out_channels=8),
            r"json: 3 of another shape, '.*' in .* first: got \[.*\b16\b.*\], want \[.*\b8\b",
        ),
        (edit("vae/config.json", _class_name="AutoencoderKLOther"), "no loader for class"),
        (edit("text_encoder/config.json", words=["cat"]), "vocabulary differs"),
        (truncate(f"transformer/{WEIGHTS}"), "copy the file again"),
        (truncate(f"vae/{WEIGHTS}"), "cannot load a codec"),
        (truncate("text_encoder/model.safetensors"), "cannot load a text encoder"),
        (lambda folder: (folder / "transformer" / WEIGHTS).unlink(), "no .safetensors file"),
        (lambda folder: (folder / "vae" / "config.json").unlink(), "cannot read"),
        (truncate("recipe.json"), "recipe.json is no JSON: .*; correct the file"),
        (lambda folder: (folder / "recipe.json").unlink(), "has no recipe.json, .* write it, by"),
        (drop("vae/config.json", "_class_name"), "has no _class_name; add one .* TinyVideoCodec"),
        (leave_pointer_of_lfs, "is a pointer of Git LFS, not the weights; .* `git lfs pull`"),
    ],
)
def test_a_broken_folder_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    spoil(folder)
    with pytest.raises(UserInputError, match=message):
        StreamSession(StreamConfig.of(folder))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (edit("vae/config.json", latent_channels=8), "vae: latent_channels"),
        (edit("text_encoder/config.json", text_dim=32), "text_encoder: text_dim"),
        (edit("text_encoder/config.json", text_len=0), "text_len: got 0, want a whole number"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused_before_any_is_loaded(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    spoil(folder)
    with pytest.raises(UserInputError, match=message):
        ModelFolder.open(folder).geometry(dtype=torch.float32)


def test_geometry_needs_no_weights_of_codec_and_text_encoder(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    whole = ModelFolder.open(folder).geometry(dtype=torch.float32)
    for file in ("vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
        (folder / file).unlink()
    bare = ModelFolder.open(folder)
    assert bare.geometry(dtype=torch.float32) == whole
    assert (bare.text_sizes().text_len, bare.text_sizes().text_dim) == (6, 64)
    assert bare.codec_sizes().temporal_stride == 4


def test_the_embedded_model_is_small_and_opens() -> None:
    model = ModelFolder.open(EMBEDDED)
    sizes = [file.stat().st_size for file in model.path.rglob("*.safetensors")]
    assert len(sizes) == 3
    assert sum(sizes) < 16e6


def test_a_stream_of_dense_attention_loads_no_compiler(tmp_path: Path) -> None:
    """It takes a rank 1.5 s, and one operator on torch's device `meta` is enough to load it."""
    program = """
        import sys
        from scope_rt import StreamConfig, StreamSession
        with StreamSession(StreamConfig.of(sys.argv[1])) as session:
            assert len(list(session.stream("red circle", num_chunks=1))) == 1
        sys.exit("torch._dynamo" in sys.modules)
    """
    model = write_tiny_folder(tmp_path / "model")
    command = [sys.executable, "-c", textwrap.dedent(program), str(model)]
    done = warm_python.run(command, timeout=100)
    assert done.returncode == 0, done.stderr
