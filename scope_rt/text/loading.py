"""UMT5's encoder from the files that people have: a diffusers folder, or Wan's own file of it."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.optional_packages import need
from scope_rt.part_place import HERE, PartPlace
from scope_rt.tensor_files.config_file import read_config
from scope_rt.tensor_files.fitting import TensorInFile, fill
from scope_rt.tensor_files.folder import tensors_of_folder
from scope_rt.tensor_files.state_dict import state_dict_of
from scope_rt.text.encoder import TextSizes
from scope_rt.text.prompt_ids import TEXT_LEN, PromptIds
from scope_rt.text.umt5 import Umt5TextEncoder
from scope_rt.text.umt5_config import EMBEDDING, Umt5Sizes, transformers_names

CLASS_NAME = "UMT5EncoderModel"
TOKENIZER = "tokenizer.json"
_STEM = "model"
_ALWAYS: Mapping[str, object] = {
    "feed_forward_proj": "gated-gelu",
    "layer_norm_epsilon": 1e-6,
    "relative_attention_max_distance": 128,
}
"""What no tensor tells, as umT5 has it."""
_FIX = "copy the folder of umT5's encoder again, with all files from one model"


def umt5_text_sizes(folder: Path) -> TextSizes:
    """Sizes of the encoder in a diffusers folder, from its `config.json` alone, or in Wan's own
    file, from its headers. Raises UserInputError."""
    if folder.is_file():
        sizes = Umt5Sizes.of(folder, transformers_names(state_dict_of(folder)))
        return TextSizes(text_len=TEXT_LEN, text_dim=sizes.d_model)
    path = folder / "config.json"
    width = read_config(path, fix=_FIX).get("d_model")
    if type(width) is not int or width < 1:
        want = "a whole number from 1"
        raise UserInputError(mismatch(f"{path}: d_model", got=width, want=want, fix=_FIX))
    return TextSizes(text_len=TEXT_LEN, text_dim=width)


def check_umt5(path: Path) -> None:
    """Refuse what `load_umt5` would, by headers, configuration and tokenizer alone.

    Raises:
        UserInputError: as `load_umt5`.
    """
    need("transformers", purpose="Wan's text encoder")
    _read(path, tokenizer=None, text_dim=None)


def load_umt5(
    path: Path,
    tokenizer: Path | None = None,
    *,
    text_dim: int | None = None,
    place: PartPlace = HERE,
) -> Umt5TextEncoder:
    """Load `text_encoder/` of a diffusers folder, or Wan's own file (`.pth` or `.safetensors`).

    Args:
        tokenizer: the `tokenizer.json`; where not given, it lies in the folder `tokenizer/` or
            `google/umt5-xxl/` beside `path`, as in the two layouts.
        text_dim: of the transformer, which the encoder must have too; not compared where not given.
        place: of the computation; what it gives is float32 on the CPU.

    Raises:
        UserInputError: transformers, tokenizers or ftfy is not installed, or a file cannot be used;
            it names the tensor.
    """
    tensors, sizes, ids = _read(path, tokenizer=tokenizer, text_dim=text_dim)
    config_class, model_class = _classes()
    with torch.device("meta"):
        model = model_class(config_class(**asdict(sizes), **_ALWAYS, dropout_rate=0.0))
    model.set_input_embeddings(model.shared)  # the embedding stands at two places, and is one
    where = f"{path}: the weights are not umT5's encoder"
    fill(model, tensors, where=where, place=place)
    return Umt5TextEncoder(model, ids, text_dim=sizes.d_model, place=place)


def _read(
    path: Path, *, tokenizer: Path | None, text_dim: int | None
) -> tuple[Mapping[str, TensorInFile], Umt5Sizes, PromptIds]:
    """All but the weights' bytes."""
    tensors = transformers_names(_tensors(path))
    sizes = Umt5Sizes.of(path, tensors)
    if text_dim not in (None, sizes.d_model):
        what = f"{path}: width of {tensors[EMBEDDING].name}"
        want = f"{text_dim}, the transformer's text_dim"
        fix = "bring the parts of one model together"
        raise UserInputError(mismatch(what, got=sizes.d_model, want=want, fix=fix))
    if path.is_dir():
        _check_config(path / "config.json", sizes, tensors)
    ids = PromptIds.from_file(tokenizer or _tokenizer_beside(path), num_rows=sizes.vocab_size)
    ids("")  # finds what is not installed before the weights are read
    return tensors, sizes, ids


def _tensors(path: Path) -> Mapping[str, TensorInFile]:
    if path.is_dir():
        return tensors_of_folder(path, _STEM)
    return state_dict_of(path)


def _tokenizer_beside(path: Path) -> Path:
    folder = "tokenizer" if path.is_dir() else "google/umt5-xxl"
    return path.parent / folder / TOKENIZER


def _check_config(path: Path, sizes: Umt5Sizes, tensors: Mapping[str, TensorInFile]) -> None:
    """What a `config.json` states is what the weights are, and what is computed."""
    raw = read_config(path, fix=_FIX)
    for name, want in _ALWAYS.items():
        if (got := raw.get(name, want)) != want:
            fix = "only umT5's encoder is computed"
            raise UserInputError(mismatch(f"{path}: {name}", got=got, want=want, fix=fix))
    for field in fields(sizes):
        want = getattr(sizes, field.name)
        if (got := raw.get(field.name, want)) != want:
            embedding = tensors[EMBEDDING]
            widths = f"{want}, as the weights have it ({embedding.name} is {list(embedding.shape)})"
            raise UserInputError(mismatch(f"{path}: {field.name}", got=got, want=widths, fix=_FIX))


def _classes() -> tuple[Any, Any]:
    need("transformers", purpose="Wan's text encoder")
    from transformers import UMT5Config, UMT5EncoderModel  # takes seconds, and rank0 alone encodes

    return UMT5Config, UMT5EncoderModel
