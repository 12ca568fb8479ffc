"""TAEHV in a stream gives what its layers give of the whole video at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.models.registry import CODECS
from scope_rt.part_place import HERE
from scope_rt.vae.checked import CheckedAnchorEncoder, CheckedDecoder
from scope_rt.vae.loading import load_small_codec
from scope_rt.vae.small import MemoryBlock, MergeFrames, SmallVideoCodec, SplitFrames

ROUNDING = 1e-5
WIDTHS = (12, 8, 6, 6)
CONTEXT = 8


def file_of(latent_channels: int = 16, last_split: int = 2) -> dict[str, Tensor]:
    """Random weights under the names of the published file, which are those of its layers."""
    shapes: dict[str, tuple[int, ...]] = {}

    def add(name: str, out: int, given: int, side: int = 3, *, has_bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (out, given, side, side)
        if has_bias:
            shapes[f"{name}.bias"] = (out,)

    def add_blocks(part: str, first: int, width: int) -> None:
        for number in range(first, first + 3):
            for layer, given in ((0, 2 * width), (2, width), (4, width)):
                add(f"{part}.{number}.conv.{layer}", width, given)

    add("encoder.0", 5, 3)
    for first, merge in ((2, 2), (7, 2), (12, 1)):
        add(f"encoder.{first}.conv", 5, 5 * merge, 1, has_bias=False)
        add(f"encoder.{first + 1}", 5, 5, has_bias=False)
        add_blocks("encoder", first + 2, 5)
    add("encoder.17", latent_channels, 5)
    add("decoder.1", WIDTHS[0], latent_channels)
    for stage, split in enumerate((1, 2, last_split)):
        first, width = 3 + 6 * stage, WIDTHS[stage]
        add_blocks("decoder", first, width)
        add(f"decoder.{first + 4}.conv", width * split, width, 1, has_bias=False)
        add(f"decoder.{first + 5}", WIDTHS[stage + 1], width, has_bias=False)
    add("decoder.22", 3, WIDTHS[3])
    generator = torch.Generator().manual_seed(0)
    weights = {n: 0.35 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}
    weights["decoder.22.bias"] += 0.5
    return weights


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(file_of(), tmp_path / "taew2_1.pth")
    return tmp_path / "taew2_1.pth"


@pytest.fixture
def codec(path: Path) -> SmallVideoCodec:
    return load_small_codec(path)


def latents(num: int) -> Tensor:
    return torch.randn(2, num, 16, 2, 4, generator=torch.Generator().manual_seed(1))


def pictures(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (2, num, 16, 32, 3), generator=generator, dtype=torch.uint8)


@torch.inference_mode()
def at_once(layers: torch.nn.Sequential, x_BTCHW: Tensor) -> Tensor:
    """Layer by layer over all frames; before the first frame there are zeros."""
    batch = len(x_BTCHW)
    for layer in layers:
        flat = x_BTCHW.flatten(0, 1)
        if isinstance(layer, MemoryBlock):
            before = F.pad(x_BTCHW, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1].flatten(0, 1)
            flat = F.relu(layer.conv(torch.cat([flat, before], 1)) + layer.skip(flat))
        elif isinstance(layer, MergeFrames):
            flat = layer.conv(flat.reshape(-1, layer.num * flat.shape[1], *flat.shape[2:]))
        elif isinstance(layer, SplitFrames):
            flat = layer.conv(flat).reshape(-1, *flat.shape[1:])
        else:
            flat = layer(flat)
        x_BTCHW = flat.unflatten(0, (batch, -1))
    return x_BTCHW


@pytest.mark.parametrize("split", [[6], [1] * 6, [4, 2]])
def test_pictures_of_any_split_are_those_of_the_whole(
    codec: SmallVideoCodec, split: list[int]
) -> None:
    decoder = codec.streaming_decoder()
    got = torch.cat([decoder.decode_video(piece) for piece in latents(6).split(split, 1)], 1)
    want = at_once(codec.model.decoder, latents(6))[:, 3:].clamp(0, 1) * 2 - 1
    assert got.shape == want.shape == (2, 21, 3, 16, 32)
    assert want.std() > 0.1
    assert (got - want).abs().max() <= ROUNDING
    assert torch.equal(got, codec.streaming_decoder().decode_video(latents(6)))


@pytest.mark.parametrize("split", [[13], [1] * 13, [2, 11]])
def test_latents_of_any_split_are_those_of_the_whole_that_stood_still_before(
    codec: SmallVideoCodec, split: list[int]
) -> None:
    encoder = codec.streaming_encoder()
    got = torch.cat([encoder.encode(piece) for piece in pictures(13).split(split, 1)], 1)
    whole = torch.cat([pictures(13)[:, :1]] * 3 + [pictures(13)], 1)
    want = at_once(codec.model.encoder, whole.permute(0, 1, 4, 2, 3).float() / 255)
    assert got.shape == want.shape == (2, 4, 16, 2, 4)
    assert want.std() > 0.1
    assert (got - want).abs().max() <= ROUNDING
    assert torch.equal(got, codec.streaming_encoder().encode(pictures(13)))


def test_the_last_latents_rebuild_a_decoder_bit_for_bit_and_one_less_does_not(
    codec: SmallVideoCodec,
) -> None:
    assert codec.decoder_context_frames == CONTEXT
    whole = codec.streaming_decoder().decode_video(latents(12))[:, -4:]
    for num, is_enough in ((CONTEXT + 1, True), (CONTEXT, True), (CONTEXT - 1, False)):
        rebuilt = codec.streaming_decoder()
        rebuilt.decode(latents(12)[:, -1 - num : -1])
        assert torch.equal(rebuilt.decode_video(latents(12)[:, -1:]), whole) is is_enough, num


def test_it_keeps_what_its_sizes_promise_and_forgets_at_a_reset(codec: SmallVideoCodec) -> None:
    decoder = CheckedDecoder(codec)
    first = decoder.decode(latents(3))
    decoder.decode(latents(3))
    decoder.reset()
    assert torch.equal(decoder.decode(latents(3)), first)
    encode = CheckedAnchorEncoder(codec)
    assert torch.equal(encode(pictures(1)), encode(pictures(1)))


def test_a_folder_with_the_file_and_its_class_is_a_codec(tmp_path: Path) -> None:
    save_file(file_of(), tmp_path / "taew2_1.safetensors")
    (tmp_path / "config.json").write_text('{"_class_name": "TAEHV"}')
    codec = CODECS.load(tmp_path, HERE)
    assert isinstance(codec, SmallVideoCodec)
    torch.save(file_of(), tmp_path / "second.pth")
    with pytest.raises(
        UserInputError, match=r"got 'second.pth, taew2_1.safetensors', want taew2_1"
    ):
        CODECS.load(tmp_path, HERE)


def with_weights(**changes: Tensor | None) -> Callable[[], dict[str, Tensor]]:
    def changed() -> dict[str, Tensor]:
        weights = file_of() | {name: w for name, w in changes.items() if w is not None}
        return {name: w for name, w in weights.items() if changes.get(name, w) is not None}

    return changed


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            lambda: file_of(latent_channels=48),
            "decoder.1.weight takes: got 48, want 16; give TAEHV",
        ),
        (lambda: file_of(last_split=1), "pictures of a latent frame in the decoder: got 2, want 4"),
        (
            with_weights(**{"decoder.22.bias": torch.ones(4)}),
            r"TAEHV's: .*'decoder.22.bias' in tae",
        ),
        (with_weights(**{"encoder.0.bias": None}), "are not TAEHV's: 1 missing, 'encoder.0.bias'"),
        (with_weights(**{"decoder.1.weight": None}), "decoder.1.weight takes: got 0, want 16"),
        (lambda: {"a": torch.ones(2, 2)}, "got 0, want 16"),
        (
            with_weights(**{"decoder.3.conv.0.weight": torch.ones(3)}),
            "decoder.3.conv.0.weight: got .3., want a convolution's weight or bias",
        ),
    ],
)
def test_another_file_is_refused(
    tmp_path: Path, weights: Callable[[], dict[str, Tensor]], message: str
) -> None:
    torch.save(weights(), tmp_path / "taew2_1.pth")
    with pytest.raises(UserInputError, match=rf"taew2_1\.pth.*{message}"):
        load_small_codec(tmp_path / "taew2_1.pth")
