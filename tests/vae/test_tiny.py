"""However a stream is cut into chunks, the codec gives the same bits; bad sizes are refused."""

from pathlib import Path

import pytest
import torch
from torch import nn

from scope_contracts.errors import UserInputError
from scope_rt.vae.codec import StreamingDecoder, StreamingEncoder, VideoCodec
from scope_rt.vae.tiny import TinyCodecConfig, TinyVideoCodec
from tests.rounding import is_rounded_to_half

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def codec() -> TinyVideoCodec:
    """Random weights everywhere, so that no part of the decoder is silent."""
    torch.manual_seed(0)
    codec = TinyVideoCodec(TinyCodecConfig(wide_channels=32, narrow_channels=8)).eval()
    for weights in codec.parameters():
        if weights.ndim > 1:
            nn.init.normal_(weights, std=0.1)
    return codec


@pytest.fixture(name="latents_BFCHW")
def _latents() -> torch.Tensor:
    return torch.randn(2, 7, 16, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cuts", [[3, 3, 1], [1] * 7, [2, 5]])
def test_chunked_decode_equals_whole_decode_exactly(
    codec: TinyVideoCodec, latents_BFCHW: torch.Tensor, cuts: list[int]
) -> None:
    whole = codec.streaming_decoder().decode(latents_BFCHW)
    decoder: StreamingDecoder = codec.streaming_decoder()
    pieces = [decoder.decode(piece) for piece in torch.split(latents_BFCHW, cuts, 1)]
    assert torch.equal(torch.cat(pieces, 1), whole)


def test_decode_with_the_previous_latent_equals_whole_decode_exactly(
    codec: TinyVideoCodec, latents_BFCHW: torch.Tensor
) -> None:
    whole = codec.decode(latents_BFCHW)
    rest = codec.decode(latents_BFCHW[:, 3:], latents_BFCHW[:, 2])
    assert torch.equal(rest, whole[:, 12:])
    assert not torch.equal(codec.decode(latents_BFCHW[:, 3:]), rest)


def decode_from(
    codec: VideoCodec, latents_BFCHW: torch.Tensor, start: int, *, context_frames: int
) -> torch.Tensor:
    """What a new decoder shows from latent `start` on, given only `context_frames` before it."""
    decoder = codec.streaming_decoder()
    if context := min(start, context_frames):
        decoder.decode(latents_BFCHW[:, start - context : start])
    return decoder.decode(latents_BFCHW[:, start:])


def test_the_stated_context_makes_a_decoder_that_never_saw_the_rest(
    codec: TinyVideoCodec, latents_BFCHW: torch.Tensor
) -> None:
    whole, context = codec.streaming_decoder().decode(latents_BFCHW), codec.decoder_context_frames
    for start in range(latents_BFCHW.shape[1]):
        seen = decode_from(codec, latents_BFCHW, start, context_frames=context)
        assert torch.equal(seen, whole[:, codec.temporal_stride * start :]), start
        if start:
            seen = decode_from(codec, latents_BFCHW, start, context_frames=context - 1)
            assert not torch.equal(seen, whole[:, codec.temporal_stride * start :]), "too much"


def test_reset_forgets_the_past(codec: TinyVideoCodec, latents_BFCHW: torch.Tensor) -> None:
    decoder = codec.streaming_decoder()
    first = decoder.decode(latents_BFCHW)
    assert not torch.equal(decoder.decode(latents_BFCHW), first)
    decoder.reset()
    assert torch.equal(decoder.decode(latents_BFCHW), first)


def test_decoder_remembers_values_even_if_the_caller_reuses_the_tensor(
    codec: TinyVideoCodec, latents_BFCHW: torch.Tensor
) -> None:
    whole = codec.streaming_decoder().decode(latents_BFCHW)
    decoder, reused = codec.streaming_decoder(), latents_BFCHW[:, :3].clone()
    decoder.decode(reused)
    reused.zero_()
    assert torch.equal(decoder.decode(latents_BFCHW[:, 3:]), whole[:, 12:])


def test_chunked_encode_equals_whole_encode_exactly(codec: TinyVideoCodec) -> None:
    frames = torch.randint(256, (1, 24, 64, 64, 3), dtype=torch.uint8)
    whole = codec.streaming_encoder().encode(frames)
    encoder: StreamingEncoder = codec.streaming_encoder()
    pieces = [encoder.encode(piece) for piece in torch.split(frames, [12, 4, 8], 1)]
    assert torch.equal(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (32, 80)])
def test_shapes_follow_the_strides(codec: TinyVideoCodec, height: int, width: int) -> None:
    stream: VideoCodec = codec
    latents = codec.encode(torch.zeros(1, 12, 3, height, width))
    assert latents.shape == (1, 3, stream.latent_channels, height // 8, width // 8)
    frames = stream.streaming_decoder().decode(latents)
    assert frames.shape == (1, 12, height, width, 3)
    assert frames.dtype == torch.uint8


@pytest.mark.parametrize("size", [(1, 11, 3, 64, 64), (1, 12, 3, 56, 64), (1, 12, 3, 64, 72)])
def test_sizes_that_do_not_fit_are_refused(codec: TinyVideoCodec, size: tuple[int, ...]) -> None:
    with pytest.raises(UserInputError, match="multiple"):
        codec.encode(torch.zeros(size))


def test_a_saved_codec_gives_the_same_bits_as_its_half_precision(
    codec: TinyVideoCodec, latents_BFCHW: torch.Tensor, tmp_path: Path
) -> None:
    codec.save_pretrained(tmp_path / "first")
    loaded = TinyVideoCodec.from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    again = TinyVideoCodec.from_pretrained(tmp_path / "second")
    assert torch.equal(loaded.decode(latents_BFCHW), again.decode(latents_BFCHW))
    assert is_rounded_to_half(loaded.encoder.weight, codec.encoder.weight)


def test_a_missing_folder_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="cannot load a codec"):
        TinyVideoCodec.from_pretrained(tmp_path)
