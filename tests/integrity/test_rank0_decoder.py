"""Rank0 shows the pictures of the latents that arrived: in strict no others, whatever changed."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import IntegrityError
from scope_rt.checks import Checks
from scope_rt.control.chunk import Chunk
from scope_rt.faults import FaultPoint
from scope_rt.models.loading import embedded_folder
from scope_rt.vae.checked import CheckedDecoder
from scope_rt.vae.tiny import TinyVideoCodec
from tests.integrity.audited import nothing
from tests.integrity.corruption import Change
from tests.integrity.rank0_streams import (
    AT,
    UNTOUCHED,
    flip_codec_weight,
    nudge,
    pixels,
    shown_with,
)
from tests.tiny_folder import write_tiny_folder

Decoded = Callable[..., list[Chunk]]


@pytest.fixture(scope="module")
def decoded_with(tmp_path_factory: pytest.TempPathFactory) -> Decoded:
    """What a stream shows by the trained codec: one of random weights hardly shows its memory."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("model"))
    shutil.copytree(embedded_folder() / "vae", folder / "vae", dirs_exist_ok=True)
    return partial(shown_with, model=folder, num_chunks=AT + 1)


@pytest.fixture(scope="module")
def clean(decoded_with: Decoded) -> list[bytes]:
    return pixels(decoded_with(UNTOUCHED, integrity="strict"))


def scale_codec_weight(decoder: CheckedDecoder) -> None:
    assert isinstance(decoder.codec, TinyVideoCodec)
    decoder.codec.decoder.full.weight.data.mul_(1.1)


def feed(decoder: CheckedDecoder) -> None:
    """Latents of another stream."""
    decoder.decode(torch.randn(1, 3, 16, 2, 4))


def reset(decoder: CheckedDecoder) -> None:
    decoder.reset()


FRAMES: dict[str, Callable[[Tensor], Tensor]] = {
    "one pixel to the right": lambda frames: frames.roll(1, 3),
    "colours swapped": lambda frames: frames.flip(-1).contiguous(),
    "frames in another order": lambda frames: frames.flip(1).contiguous(),
    "another scale": lambda frames: (frames.float() * 0.9).byte(),
    "wrapped around": lambda frames: frames + 16,
    "blank": torch.zeros_like,
    "one number": lambda frames: (
        frames.flatten()
        .index_add(0, torch.tensor(10_000), torch.ones(1, dtype=torch.uint8))
        .view_as(frames)
    ),
    "a frame too few": lambda frames: frames[:, 1:].contiguous(),
}


ANOTHER = rf"chunk {AT}: rank 0: (its latents were decoded to another picture|decoded frames)"


STRICT: dict[str, tuple[FaultPoint, Callable[[Any], Any], str]] = {
    "weight of the codec": (FaultPoint.DECODER, flip_codec_weight, "weight vae.decoder.full.bias"),
    "memory of another stream": (FaultPoint.DECODER, feed, ANOTHER),
    "no memory": (FaultPoint.DECODER, reset, ANOTHER),
    **{name: (FaultPoint.DECODED, change, ANOTHER) for name, change in FRAMES.items()},
}


@pytest.mark.parametrize("name", STRICT)
def test_strict_shows_nothing_of_a_decoder_that_gives_other_pictures(
    decoded_with: Decoded, clean: list[bytes], name: str
) -> None:
    point, change, said = STRICT[name]
    shown: list[Chunk] = []
    broken = Change(point, AT, change)
    with pytest.raises(IntegrityError, match=said) as raised:
        decoded_with(broken, shown=shown, integrity="strict")
    assert broken.was_made
    assert pixels(shown) == clean[:AT]
    assert raised.value.retraction is None


DISARMED: dict[str, tuple[FaultPoint, Callable[[Any], Any], dict[str, Any]]] = {
    "decoder": (FaultPoint.DECODED, FRAMES["one pixel to the right"], {"decoded": nothing}),
    "weights": (FaultPoint.DECODER, scale_codec_weight, {"weights": nothing, "codec": nothing}),
    "latents": (FaultPoint.ARRIVED, nudge, {"kept": nothing, "emitted": nothing}),
    "emission": (
        FaultPoint.EMIT,
        lambda chunk: replace(chunk, frames=chunk.frames[::-1].copy()),
        {"emitted": nothing},
    ),
}


@pytest.mark.parametrize("name", DISARMED)
def test_without_its_check_a_change_is_shown_in_strict(
    decoded_with: Decoded, clean: list[bytes], name: str
) -> None:
    point, change, off = DISARMED[name]
    checks = replace(Checks(), **off)
    wrong = decoded_with(Change(point, AT, change), checks=checks, integrity="strict")
    assert pixels(wrong) != clean


@pytest.mark.parametrize("level", ["default", "strict"])
def test_a_picture_of_one_value_that_another_decoder_does_not_show_is_refused(
    decoded_with: Decoded, level: str
) -> None:
    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match=ANOTHER):
        decoded_with(Change(FaultPoint.DECODED, AT, torch.zeros_like), shown=shown, integrity=level)
    assert len(shown) == AT
