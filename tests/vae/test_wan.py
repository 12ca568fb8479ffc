"""Wan's VAE gives in a stream what diffusers' class gives of the whole, bit for bit."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.part_place import PartPlace
from scope_rt.vae.checked import CheckedAnchorEncoder, CheckedDecoder
from scope_rt.vae.codec import num_frames
from scope_rt.vae.loading import constructor_arguments, load_wan_codec, wan_codec_sizes
from scope_rt.vae.wan import WanVideoCodec
from scope_rt.vae.wan_config import WanVaeConfig
from tests.real_checkpoints import FASTVIDEO, NEEDS_WAN, ORIGINAL_VAE, Recording, of_each_recording

pytestmark = NEEDS_WAN

PIXELS = 1e-5
"""Of recorded pixels in [0, 1]."""
ROWS, COLUMNS = 2, 4
CONTEXT = 38
SMALL = WanVaeConfig(
    base_dim=2,
    z_dim=4,
    dim_mult=(1, 2, 2, 2),
    num_res_blocks=2,
    temperal_downsample=(False, True, True),
    latents_mean=(0.0,) * 4,
    latents_std=(1.0,) * 4,
)


@pytest.fixture(scope="module")
def codec() -> WanVideoCodec:
    return load_wan_codec(FASTVIDEO / "vae")


def latents(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, num, 16, ROWS, COLUMNS, generator=generator)


def pictures(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (1, num, 8 * ROWS, 8 * COLUMNS, 3)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def raw(normalised_BFCHW: Tensor, config: WanVaeConfig) -> Tensor:
    """What diffusers' class takes and gives: not normalised, and channels before frames."""
    mean = torch.tensor(config.latents_mean)[:, None, None]
    std = torch.tensor(config.latents_std)[:, None, None]
    return (normalised_BFCHW * std + mean).transpose(1, 2)


@of_each_recording
def test_pixels_are_those_of_the_recorded_latents(recording: Recording) -> None:
    recorded = recording.tensors()
    if "pixels" not in recorded:
        pytest.skip("no pixels in this recording")
    want = recorded["pixels"]
    low = -1.0 if "[-1,1]" in json.loads(recording.details.read_text())["pixel_layout"] else 0.0
    video = load_wan_codec(recording.vae()).streaming_decoder().decode_video(recorded["latents"])
    got = video[0, : len(want)] if low else video[0, : len(want)] / 2 + 0.5
    assert (got - want).abs().max() <= PIXELS


@pytest.mark.parametrize("path", [FASTVIDEO / "vae", ORIGINAL_VAE], ids=["diffusers", "original"])
@pytest.mark.parametrize("split", [[7], [1] * 7, [3, 3, 1], [2, 5]])
def test_any_split_is_diffusers_decode_of_the_whole(path: Path, split: list[int]) -> None:
    codec = load_wan_codec(path)
    decoder = codec.streaming_decoder()
    got = torch.cat([decoder.decode_video(piece) for piece in latents(7).split(split, 1)], 1)
    config = WanVaeConfig.read(FASTVIDEO / "vae/config.json")
    with torch.inference_mode():
        whole = codec.vae.decode(raw(latents(7), config)).sample.transpose(1, 2)
    assert got.std() > 0.1
    assert torch.equal(got, whole)


@pytest.mark.parametrize("split", [[17], [1] * 17, [1, 4, 12], [5, 3, 9]])
def test_any_split_is_diffusers_encode_of_the_whole(codec: WanVideoCodec, split: list[int]) -> None:
    encoder = codec.streaming_encoder()
    got = torch.cat([encoder.encode(piece) for piece in pictures(17).split(split, 1)], 1)
    video = (pictures(17).float() / 127.5 - 1).permute(0, 4, 1, 2, 3)
    config = WanVaeConfig.read(FASTVIDEO / "vae/config.json")
    with torch.inference_mode():
        mode = codec.vae.encode(video).latent_dist.mode().transpose(1, 2)
    mean = torch.tensor(config.latents_mean)[:, None, None]
    std = torch.tensor(config.latents_std)[:, None, None]
    assert got.shape == (1, 5, 16, ROWS, COLUMNS)
    assert torch.equal(got, (mode - mean) / std)


def test_a_second_epoch_is_like_the_first(codec: WanVideoCodec) -> None:
    decoder, encoder = codec.streaming_decoder(), codec.streaming_encoder()
    first = decoder.decode(latents(3)), encoder.encode(pictures(7))
    decoder.reset()
    encoder.reset()
    again = decoder.decode(latents(3)), encoder.encode(pictures(7))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_the_last_latents_rebuild_a_decoder_bit_for_bit_and_one_less_does_not(
    codec: WanVideoCodec,
) -> None:
    assert codec.decoder_context_frames == CONTEXT
    all_of_them = latents(CONTEXT + 6)
    want = codec.streaming_decoder().decode_video(all_of_them)[:, -codec.temporal_stride :]
    for num, is_enough in ((CONTEXT + 1, True), (CONTEXT, True), (CONTEXT - 1, False)):
        rebuilt = codec.streaming_decoder()
        rebuilt.decode(all_of_them[:, -1 - num : -1])
        assert torch.equal(rebuilt.decode_video(all_of_them[:, -1:]), want) is is_enough, num


@pytest.mark.parametrize(
    ("sizes", "context"),
    [
        ({}, CONTEXT),
        ({"num_res_blocks": 1}, None),
        ({"temperal_downsample": (True, False, True)}, None),
        ({"temperal_downsample": (False, False, False)}, None),
        ({"dim_mult": (1, 2, 2), "temperal_downsample": (True, True)}, None),
    ],
)
def test_the_context_that_is_derived_is_how_far_a_picture_depends(
    sizes: dict[str, Any], context: int | None
) -> None:
    """By derivatives, which are zero where a latent frame is not seen, however little it counts."""
    torch.manual_seed(0)
    config = replace(SMALL, **sizes)
    derived = config.sizes.decoder_context_frames
    assert context is None or derived == context
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(**constructor_arguments(config)).double().eval()
    seen = torch.randn(1, derived + 4, 4, 1, 1, dtype=torch.double, requires_grad=True)
    stream = WanVideoCodec(vae, config)
    carried = stream.nothing_carried(vae.decoder)
    for place, frame in enumerate(seen.unbind(1)):
        last = vae.decoder(
            frame[:, :, None], feat_cache=carried, feat_idx=[0], first_chunk=place == 0
        )
    (slopes,) = torch.autograd.grad(last.sum(), seen)
    depends = slopes[0].flatten(1).abs().amax(1).flip(0) > 0
    assert depends.tolist() == [True] * (derived + 1) + [False] * 3


def test_names_and_sizes_of_the_original_file_become_diffusers_own() -> None:
    single_file = pytest.importorskip("diffusers.loaders.single_file_utils")
    stored = torch.load(ORIGINAL_VAE, weights_only=True)
    want = single_file.convert_wan_vae_to_diffusers(stored)
    got = dict(load_wan_codec(ORIGINAL_VAE).vae.named_parameters())
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], weight) for name, weight in want.items())


def test_frames_and_anchors_are_what_the_sizes_promise(codec: WanVideoCodec) -> None:
    sizes = wan_codec_sizes(FASTVIDEO / "vae")
    decoder = CheckedDecoder(codec)
    for starts_epoch in (True, False):
        frames = decoder.decode(latents(3))
        assert frames.shape[1] == num_frames(sizes, 3, starts_epoch=starts_epoch)
    anchor = CheckedAnchorEncoder(codec)(pictures(1))
    assert torch.equal(anchor, codec.streaming_encoder().encode(pictures(1)))


def test_it_computes_in_a_dtype_of_its_own(codec: WanVideoCodec) -> None:
    half = load_wan_codec(FASTVIDEO / "vae", PartPlace(dtype=torch.bfloat16))
    assert {weight.dtype for weight in half.vae.parameters()} == {torch.bfloat16}
    want = codec.streaming_decoder().decode_video(latents(2))
    got = half.streaming_decoder().decode_video(latents(2))
    assert got.dtype is torch.float32
    assert 0 < (got - want).abs().mean() < 0.02
    assert half.streaming_encoder().encode(pictures(5)).dtype is torch.float32


def test_pictures_of_an_odd_size_are_refused(codec: WanVideoCodec) -> None:
    with pytest.raises(UserInputError, match="got 12x32, want multiples of 8"):
        codec.streaming_encoder().encode(pictures(1)[:, :, :12])


def edit(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def drop_weight(folder: Path, name: str) -> None:
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    del weights[name]
    save_file(weights, path)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"z_dim": 8}, r"config.json: latents_mean: got 16, want 8 entries, which is z_dim"),
        (
            {"z_dim": 8, "latents_mean": [0.5] * 8, "latents_std": [1.5] * 8},
            r"config.json: z_dim: got 8, want \[16\], the width of post_quant_conv.weight in .*",
        ),
        ({"latents_mean": [0.5] * 15}, "config.json: latents_mean: got 15, want 16 entries"),
        ({"latents_std": ["1"] * 16}, "config.json: latents_std: .* want a list of float"),
        ({"latents_std": [1.0] * 15 + [0]}, "config.json: latents_std: .* want numbers above 0"),
        ({"latents_mean": [math.nan] * 16}, "config.json: latents_mean: .* want finite numbers"),
        ({"base_dim": 8}, r"config.json: base_dim: got 8, want \[4\], the width of encoder.conv"),
        ({"num_res_blocks": 3}, "are not Wan's VAE: .* missing, 'encoder.*' first"),
        ({"is_residual": True}, "config.json: is_residual: got True, want False"),
        ({"patch_size": 2}, "config.json: patch_size: got 2, want None"),
        ({"dim_mult": None}, "config.json: dim_mult: got None, want a list of int"),
    ],
)
def test_a_config_that_is_not_that_of_the_weights_is_refused(
    tmp_path: Path, entries: dict[str, object], message: str
) -> None:
    folder = shutil.copytree(FASTVIDEO / "vae", tmp_path / "vae")
    edit(folder, **entries)
    with pytest.raises(UserInputError, match=message):
        load_wan_codec(folder)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(FASTVIDEO / "vae", tmp_path / "vae")
    drop_weight(folder, "decoder.conv_in.weight")
    with pytest.raises(UserInputError, match=r"vae: .*: 1 missing, 'decoder.conv_in.weight' first"):
        load_wan_codec(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("conv2.weight", lambda weight: weight[:8, :8], r"conv2.weight: got 8, want 16 channels"),
        ("encoder.conv1.weight", None, r"has no tensor encoder.conv1.weight; give Wan's own"),
        ("decoder.head.2.bias", None, r"1 missing, 'decoder.conv_out.bias' first"),
        (
            "decoder.head.2.bias",
            lambda weight: weight[:2],
            r"1 of another shape, 'decoder.head.2.bias' in VAE.pth first: got \[2\], want \[3\]",
        ),
        ("decoder.head.2.bias", lambda weight: weight.int(), r"bias' is torch.int32, want a tens"),
    ],
)
def test_an_original_file_of_another_vae_is_refused(
    tmp_path: Path, name: str, change: object, message: str
) -> None:
    weights = torch.load(ORIGINAL_VAE, weights_only=True)
    weight = weights.pop(name)
    if callable(change):
        weights[name] = change(weight)
    torch.save(weights, tmp_path / "VAE.pth")
    with pytest.raises(UserInputError, match=rf"VAE\.pth.*{message}"):
        load_wan_codec(tmp_path / "VAE.pth")
