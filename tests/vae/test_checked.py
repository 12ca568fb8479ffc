"""A codec that breaks its own promise is named at the first chunk that shows it."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scope_contracts.errors import UserInputError
from scope_rt.vae.checked import CheckedAnchorEncoder, CheckedDecoder
from tests.vae.parameter_codec import ParameterCodec

LATENTS_BFCHW = torch.zeros(1, 3, 16, 2, 4)
FRAMES_BTHWC = torch.zeros(1, 1, 16, 32, 3, dtype=torch.uint8)


def test_an_epoch_s_first_latent_frame_has_frames_of_its_own_number() -> None:
    decoder = CheckedDecoder(ParameterCodec())
    assert [decoder.decode(LATENTS_BFCHW).shape[1] for _ in range(2)] == [9, 12]
    decoder.reset()
    assert decoder.decode(LATENTS_BFCHW).shape[1] == 9


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda frames: frames[:, 1:], r"uint8 \[1, 8, 16, 32, 3\]"),
        (lambda frames: frames[:, :, :8], r"uint8 \[1, 9, 8, 32, 3\]"),
        (lambda frames: frames.movedim(-1, 2), r"uint8 \[1, 9, 3, 16, 32\]"),
        (lambda frames: frames[0], r"uint8 \[9, 16, 32, 3\]"),
        (lambda frames: frames.float(), r"float32 \[1, 9, 16, 32, 3\]"),
        (lambda frames: frames.numpy(), "ndarray"),
    ],
)
def test_frames_other_than_promised_are_refused(
    wrong: Callable[[Tensor], Tensor | np.ndarray], got: str
) -> None:
    decoder = CheckedDecoder(ParameterCodec(spoil=wrong))
    want = r"want uint8 \[1, 9, 16, 32, 3\]"
    with pytest.raises(UserInputError, match=rf"^codec ParameterCodec: .*decode.*{got}.*{want}"):
        decoder.decode(LATENTS_BFCHW)


def test_a_later_chunk_of_the_first_one_s_length_is_refused() -> None:
    decoder = CheckedDecoder(ParameterCodec(spoil=lambda frames: frames[:, -9:]))
    decoder.decode(LATENTS_BFCHW)
    with pytest.raises(UserInputError, match=r"got .*\[1, 9, .*want uint8 \[1, 12, 16, 32, 3\]"):
        decoder.decode(LATENTS_BFCHW)


def test_a_decoder_that_writes_over_the_chunk_before_is_refused() -> None:
    """The video's writer would encode the later pictures twice."""
    memory = torch.empty(1, 12, 16, 32, 3, dtype=torch.uint8)

    def in_one_place(frames: Tensor) -> Tensor:
        return memory[:, : frames.shape[1]].copy_(frames)

    decoder = CheckedDecoder(ParameterCodec(spoil=in_one_place))
    decoder.decode(LATENTS_BFCHW)
    with pytest.raises(UserInputError, match=r"^codec ParameterCodec: .*give a new tensor each t"):
        decoder.decode(LATENTS_BFCHW)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda latents: latents[:, :, :8], r"float32 \[1, 1, 8, 2, 4\]"),
        (lambda latents: latents[:, :0], r"float32 \[1, 0, 16, 2, 4\]"),
        (lambda latents: latents.int(), r"int32 \[1, 1, 16, 2, 4\]"),
    ],
)
def test_an_anchor_other_than_promised_is_refused(
    wrong: Callable[[Tensor], Tensor], got: str
) -> None:
    encode = CheckedAnchorEncoder(ParameterCodec(spoil=wrong))
    want = r"want float32 \[1, 1, 16, 2, 4\]"
    with pytest.raises(UserInputError, match=rf"^codec ParameterCodec: .*encode.*{got}.*{want}"):
        encode(FRAMES_BTHWC)


def test_an_anchor_of_any_float_is_taken() -> None:
    encode = CheckedAnchorEncoder(ParameterCodec(spoil=lambda latents: latents.half()))
    assert encode(FRAMES_BTHWC).dtype is torch.float16


def test_a_module_s_frames_and_latents_carry_no_graph() -> None:
    codec = ParameterCodec()
    assert isinstance(codec, nn.Module)
    with torch.inference_mode():
        latents = LATENTS_BFCHW.clone()  # as a generator's are
    assert not CheckedDecoder(codec).decode(latents).requires_grad
    assert not CheckedAnchorEncoder(codec)(FRAMES_BTHWC).requires_grad
