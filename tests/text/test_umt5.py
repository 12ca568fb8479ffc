"""Prompts have the ids and embeddings that the original code gives them, or one sentence."""

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.part_place import PartPlace
from scope_rt.text.cleaning import cleaned
from scope_rt.text.loading import check_umt5, load_umt5, umt5_text_sizes
from scope_rt.text.prompt_ids import TEXT_LEN, PromptIds
from scope_rt.text.umt5 import Umt5TextEncoder
from tests.real_checkpoints import (
    FASTVIDEO,
    NEEDS_WAN,
    ORIGINAL_TEXT,
    ORIGINAL_TOKENIZER,
    SELF_FORCING,
    Recording,
    of_each_recording,
)

pytestmark = NEEDS_WAN

EMBEDDINGS = 1e-5
WIDTH = 64
PROMPT = "A small red fox walks slowly through the snow at night."


@pytest.fixture(scope="module")
def encoder() -> Umt5TextEncoder:
    return load_umt5(ORIGINAL_TEXT)


@pytest.fixture(scope="module")
def ids() -> PromptIds:
    return PromptIds.from_file(ORIGINAL_TOKENIZER, num_rows=576)


@of_each_recording
def test_ids_and_embeddings_are_those_of_the_recording(recording: Recording) -> None:
    recorded, prompts = recording.tensors(), recording.prompts()
    encoder = load_umt5(recording.text_encoder())
    for prompt, row, mask in zip(
        prompts, recorded["token_ids"], recorded["attention_mask"], strict=True
    ):
        assert encoder.ids(prompt) == row[: mask.sum()].tolist()
    want, got = recorded["text_embeds"], encoder(prompts)
    longest = want.shape[1]
    assert got.shape == (len(prompts), TEXT_LEN, WIDTH)
    assert (got[:, :longest] - want).abs().max() <= EMBEDDINGS
    assert not got[:, longest:].any()


def test_embeddings_are_those_of_transformers_on_all_512_ids(encoder: Umt5TextEncoder) -> None:
    from transformers import UMT5EncoderModel

    ids = encoder.ids(PROMPT)
    padded = torch.zeros(1, TEXT_LEN, dtype=torch.long)
    padded[0, : len(ids)] = torch.tensor(ids)
    want = torch.zeros(1, TEXT_LEN, WIDTH)
    theirs = UMT5EncoderModel.from_pretrained(FASTVIDEO / "text_encoder", dtype=torch.float32)
    with torch.inference_mode():
        hidden = theirs(input_ids=padded, attention_mask=(padded > 0).long()).last_hidden_state
    want[:, : len(ids)] = hidden[:, : len(ids)]
    got = load_umt5(FASTVIDEO / "text_encoder")([PROMPT])
    assert want.std() > 0.01
    assert (got - want).abs().max() <= EMBEDDINGS


def test_equal_prompts_have_equal_bits_in_any_company(encoder: Umt5TextEncoder) -> None:
    alone = encoder([PROMPT])
    among = encoder(["", "a fox " * 90, PROMPT])
    assert torch.equal(among[2:], alone)
    assert torch.equal(encoder([PROMPT]), alone)


@pytest.mark.parametrize(
    "case",
    json.loads((SELF_FORCING / "tokenizer_cases.json").read_text()),
    ids=lambda case: case["text"][:12],
)
def test_ids_are_those_of_tokenizer_json(case: dict[str, Any], ids: PromptIds) -> None:
    """Of the cleaned text, which differs from the text itself in some of the cases."""
    if case["repeat_of"]:
        piece, times = case["repeat_of"]
        num, first, last = case["tokenizer_json"]
        whole = ids(piece * times)
        assert num > len(whole) == TEXT_LEN
        assert (whole[: len(first)], whole[-1]) == (first, case["last_id_when_cut_to_512"])
        assert last[-1] == whole[-1]
    else:
        assert cleaned(case["text"]) == case["text_after_wan_whitespace_clean"]
        assert ids(case["text"]) == case["ids_of_the_cleaned_text_tokenizer_json"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("  a\tfox \n\n in  snow ", "a fox in snow"),
        ("\u201cred\u201d \ufb01re", '"red" fire'),
        ("schÃ¶n", "schön"),
        ("a &amp;lt; b", "a < b"),
        ("cafe\u0301", "caf\u00e9"),
        ("full\u3000width \uff21", "full width A"),
    ],
)
def test_text_is_cleaned_as_the_original_code_does(text: str, want: str) -> None:
    assert cleaned(text) == want


def test_a_longer_prompt_is_cut_with_one_warning(
    encoder: Umt5TextEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    longer = "fox " * 600
    with caplog.at_level(logging.WARNING):
        embedded = encoder([longer])
        assert torch.equal(encoder([longer]), embedded)
        encoder(["fox " * 300])
    (warning,) = caplog.messages
    assert "more than 512 tokens" in warning
    assert len(warning) < 300
    assert embedded[0, -1].any()
    assert encoder.ids(longer)[-1] == 1
    encoder(["lamp " * 600])
    assert len(caplog.messages) == 2


def test_it_computes_in_a_dtype_of_its_own(encoder: Umt5TextEncoder) -> None:
    half = load_umt5(ORIGINAL_TEXT, place=PartPlace(dtype=torch.bfloat16))
    assert {weight.dtype for weight in half.model.parameters()} == {torch.bfloat16}
    got, want = half([PROMPT]), encoder([PROMPT])
    assert got.dtype is torch.float32
    assert 0 < (got - want).abs().mean() < 0.05 * want.abs().mean()


def test_the_embedding_is_held_once(encoder: Umt5TextEncoder) -> None:
    assert encoder.model.shared.weight is encoder.model.encoder.embed_tokens.weight
    assert {p.data_ptr() for p in encoder.model.parameters()} == {
        p.data_ptr() for p in encoder.model.state_dict().values()
    }


def test_sizes_are_known_without_the_weights(tmp_path: Path) -> None:
    shutil.copy(FASTVIDEO / "text_encoder/config.json", tmp_path)
    sizes = umt5_text_sizes(tmp_path)
    assert (sizes.text_len, sizes.text_dim) == (TEXT_LEN, WIDTH)


def test_the_original_names_in_safetensors_are_the_same_encoder(
    tmp_path: Path, encoder: Umt5TextEncoder
) -> None:
    path = tmp_path / "models_t5_umt5-xxl-enc-bf16.safetensors"
    save_file(torch.load(ORIGINAL_TEXT, weights_only=True), path)
    assert torch.equal(load_umt5(path, ORIGINAL_TOKENIZER)([PROMPT]), encoder([PROMPT]))


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda weights: weights.pop(name)


def cut(name: str, *size: int) -> Callable[[dict[str, Tensor]], object]:
    places = tuple(map(slice, size))
    return lambda weights: weights.update({name: weights[name][places].clone()})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("token_embedding.weight"), "has no tensor shared.weight, under this or its orig"),
        (without("blocks.1.ffn.fc1.weight"), r"1 missing, 'encoder.block.1.*wi_1.weight' first"),
        (without("norm.weight"), "1 missing, 'encoder.final_layer_norm.weight' first"),
        (
            cut("blocks.1.attn.k.weight", 64, 48),
            r"'blocks.1.attn.k.weight' in T5.pth first: got \[64, 48\], want \[64, 64\]",
        ),
        (cut("token_embedding.weight", 500), r"has 545 ids, and the .* embedding 500 rows; copy"),
        (
            cut("token_embedding.weight", 576, 48),
            r"in T5.pth first: got \[64, 64\], want \[64, 48\]; copy",
        ),
        (cut("blocks.0.pos_embedding.embedding.weight", 0), r"\[0, 4\], want a matrix"),
        (lambda weights: weights.update(extra=torch.ones(1)), "1 unexpected, 'extra' in T5.pth fi"),
    ],
)
def test_an_original_file_of_another_encoder_is_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    weights = torch.load(ORIGINAL_TEXT, weights_only=True)
    spoil(weights)
    torch.save(weights, tmp_path / "T5.pth")
    with pytest.raises(UserInputError, match=message):
        load_umt5(tmp_path / "T5.pth", ORIGINAL_TOKENIZER)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"d_model": 48}, r"d_model: got 48, want 64, as the weights .*shared.weight is \[576, 64"),
        ({"num_layers": 3}, "num_layers: got 3, want 2, as the weights have it"),
        ({"num_heads": 8}, "num_heads: got 8, want 4"),
        ({"feed_forward_proj": "relu"}, "feed_forward_proj: got 'relu', want gated-gelu"),
        (
            {"relative_attention_max_distance": 64},
            "relative_attention_max_distance: got 64, want 128",
        ),
    ],
)
def test_a_config_that_is_not_that_of_the_weights_is_refused(
    tmp_path: Path, entries: dict[str, object], message: str
) -> None:
    folder = shutil.copytree(FASTVIDEO / "text_encoder", tmp_path / "text_encoder")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(UserInputError, match=rf"config\.json: {message}"):
        load_umt5(folder, FASTVIDEO / "tokenizer/tokenizer.json")


@pytest.mark.parametrize("path", [ORIGINAL_TEXT, FASTVIDEO / "text_encoder"])
def test_an_encoder_of_another_width_than_the_transformer_is_refused(path: Path) -> None:
    name = r"(token_embedding|shared)\.weight"
    want = f"{path.name}: width of {name}: got 64, want 4096, the transformer's text_dim; bring"
    with pytest.raises(UserInputError, match=want):
        load_umt5(path, text_dim=4096)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(FASTVIDEO / "text_encoder", tmp_path / "text_encoder")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserInputError, match=r"index.json: .* is in model-00002.*, which is not"):
        load_umt5(folder, FASTVIDEO / "tokenizer/tokenizer.json")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda path: path.unlink(),
            "cannot read .*tokenizer.json: .*No such file.*; copy the tok",
        ),
        (
            lambda path: path.write_text(path.read_text()[:99]),
            "cannot read .*tokenizer.json: .*; c",
        ),
        (
            lambda path: path.write_text("[]"),
            "cannot read .*tokenizer.json: .*; copy the tokenizer",
        ),
        (
            lambda path: path.write_bytes(b"\xff\xfe"),
            "cannot read .*tokenizer.json: .*; copy the t",
        ),
        (
            lambda path: path.write_text(
                json.dumps(json.loads(path.read_text()) | {"post_processor": None})
            ),
            r"tokenizer.json gives \[\] for an empty prompt, want \[1\]; copy umT5's tokenizer",
        ),
    ],
)
def test_another_tokenizer_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "tokenizer.json"
    shutil.copy(ORIGINAL_TOKENIZER, path)
    spoil(path)
    with pytest.raises(UserInputError, match=message):
        load_umt5(ORIGINAL_TEXT, path)


@pytest.mark.parametrize("package", ["ftfy", "tokenizers", "transformers"])
def test_a_package_that_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserInputError, match=rf"needs {package}, .*; install scope-rt\[wan\]"):
        load_umt5(ORIGINAL_TEXT)


def test_weights_of_the_folder_are_those_of_its_files() -> None:
    encoder = load_umt5(FASTVIDEO / "text_encoder")
    stored: dict[str, Tensor] = {}
    for path in (FASTVIDEO / "text_encoder").glob("*.safetensors"):
        stored |= load_file(path)
    held = dict(encoder.model.named_parameters())
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[name], weight) for name, weight in stored.items())


def test_headers_tell_what_a_load_would_refuse(tmp_path: Path) -> None:
    """Whoever only starts ranks reads no weights."""
    check_umt5(FASTVIDEO / "text_encoder")
    folder = shutil.copytree(FASTVIDEO / "text_encoder", tmp_path / "text_encoder")
    with pytest.raises(UserInputError, match=r"tokenizer\.json"):
        check_umt5(folder)
    shutil.copytree(FASTVIDEO / "tokenizer", tmp_path / "tokenizer")
    check_umt5(folder)
    cut = next(path for path in folder.iterdir() if path.suffix == ".safetensors")
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(UserInputError, match=f"cannot read .*{cut.name}"):
        check_umt5(folder)


def test_an_encoder_that_is_offloaded_is_on_its_device_while_it_encodes(
    encoder: Umt5TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = list[str]()
    monkeypatch.setattr(encoder, "_place", PartPlace(offload=True))
    monkeypatch.setattr(encoder.model, "to", lambda device: moves.append(str(device)))
    want, forward = encoder([PROMPT]), encoder.model.forward

    def watched(**inputs: Tensor) -> object:
        moves.append("encodes")
        return forward(**inputs)

    monkeypatch.setattr(encoder.model, "forward", watched)
    moves.clear()
    assert torch.equal(encoder([PROMPT]), want)
    assert moves == ["cpu", "encodes", "cpu"]
