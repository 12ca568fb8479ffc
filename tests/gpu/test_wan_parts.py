"""Wan's VAE and text encoder on a device of their own keep their rules and a CPU's numbers."""

import pytest
import torch

from scope_rt.part_place import PartPlace
from scope_rt.text.loading import load_umt5
from scope_rt.vae.loading import load_wan_codec
from tests.real_checkpoints import FASTVIDEO, NEEDS_WAN

pytestmark = NEEDS_WAN

ROUNDING = 1e-2
"""Of pixels in [-1, 1] and of embeddings. No GPU has run this: to be tightened by the first one."""
NUM_LATENTS, CONTEXT = 40, 38


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pictures_on_a_device_do_not_depend_on_the_split_and_are_rebuilt_to_the_bit(
    device: torch.device, dtype: torch.dtype
) -> None:
    codec = load_wan_codec(FASTVIDEO / "vae", PartPlace(device=device, dtype=dtype))
    latents = torch.randn(1, NUM_LATENTS, 16, 2, 4, generator=torch.Generator().manual_seed(0))
    whole = codec.streaming_decoder().decode_video(latents)
    pieces = codec.streaming_decoder()
    split = torch.cat([pieces.decode_video(piece) for piece in latents.split(5, 1)], 1)
    assert torch.equal(split, whole)
    rebuilt = codec.streaming_decoder()
    rebuilt.decode(latents[:, -1 - CONTEXT : -1])
    assert torch.equal(rebuilt.decode_video(latents[:, -1:]), whole[:, -codec.temporal_stride :])
    assert (
        whole.device.type == codec.streaming_decoder().decode(latents[:, :1]).device.type == "cpu"
    )
    if dtype is torch.float32:
        want = load_wan_codec(FASTVIDEO / "vae").streaming_decoder().decode_video(latents)
        assert (whole - want).abs().max() <= ROUNDING


def test_latents_of_pictures_come_from_a_device_to_the_cpu(device: torch.device) -> None:
    pictures = torch.randint(0, 256, (1, 9, 16, 32, 3), dtype=torch.uint8)
    encoder = load_wan_codec(FASTVIDEO / "vae", PartPlace(device=device)).streaming_encoder()
    got = torch.cat([encoder.encode(piece) for piece in pictures.split(2, 1)], 1)
    want = load_wan_codec(FASTVIDEO / "vae").streaming_encoder().encode(pictures)
    assert got.shape == want.shape == (1, 3, 16, 2, 4)
    assert got.device.type == "cpu"
    assert (got - want).abs().max() <= ROUNDING


def test_embeddings_come_from_a_device_to_the_cpu(device: torch.device) -> None:
    prompt = ["A small red fox walks slowly through the snow at night."]
    got = load_umt5(FASTVIDEO / "text_encoder", place=PartPlace(device=device))(prompt)
    want = load_umt5(FASTVIDEO / "text_encoder")(prompt)
    assert got.device.type == "cpu"
    assert (got - want).abs().max() <= ROUNDING
