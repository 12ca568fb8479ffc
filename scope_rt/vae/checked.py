"""What a codec gives is what its sizes promise; it is computed without autograd.

A codec is the user's own code: what is not checked here would be found chunks later, in a video of
another length or in a recompute.
"""

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.vae.codec import StreamingDecoder, VideoCodec, num_frames


class CheckedDecoder:
    """The decoder of `codec`; the shape and dtype of every chunk's frames are checked."""

    def __init__(self, codec: VideoCodec) -> None:
        self.codec = codec
        self._decoder: StreamingDecoder = codec.streaming_decoder()
        self._starts_epoch = True
        self._last_BTHWC = torch.empty(0, dtype=torch.uint8)
        """Kept alive, so that the next frames lie there only if the codec put them there."""

    @torch.inference_mode()
    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        """The next frames, uint8 `[B, T, H, W, 3]`.

        Raises:
            UserInputError: the codec gave something else.
        """
        codec = self.codec
        frames_BTHWC = self._decoder.decode(latents_BFCHW)
        batch, num_latents, _, rows, columns = latents_BFCHW.shape
        num = num_frames(codec, num_latents, starts_epoch=self._starts_epoch)
        height, width = rows * codec.spatial_stride, columns * codec.spatial_stride
        self._starts_epoch = False
        want = _form(torch.uint8, (batch, num, height, width, 3))
        _check(codec, "decode", frames_BTHWC, want=want)
        if frames_BTHWC.data_ptr() == self._last_BTHWC.data_ptr():
            raise UserInputError(
                f"codec {type(codec).__name__}: decode gives the memory of the chunk before, whose "
                "frames are still being written; give a new tensor each time"
            )
        self._last_BTHWC = frames_BTHWC
        return frames_BTHWC

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget the past: the next latent is the first of an epoch."""
        self._decoder.reset()
        self._starts_epoch = True


class CheckedAnchorEncoder:
    """The encoder of `codec`, for frames as the beginning of a video."""

    def __init__(self, codec: VideoCodec) -> None:
        self._codec = codec
        self._encoder = codec.streaming_encoder()

    @torch.inference_mode()
    def __call__(self, frames_BTHWC: Tensor) -> Tensor:
        """The latent frame `[B, 1, C, H/8, W/8]` of first frames, uint8 `[B, T, H, W, 3]`.

        Raises:
            UserInputError: the codec gave something else.
        """
        codec = self._codec
        self._encoder.reset()
        latents_BFCHW = self._encoder.encode(frames_BTHWC)
        batch, _, height, width, _ = frames_BTHWC.shape
        rows, columns = height // codec.spatial_stride, width // codec.spatial_stride
        shape = (batch, 1, codec.latent_channels, rows, columns)
        # Any float will do: the context is cast to the dtype of the latents.
        is_float = isinstance(latents_BFCHW, Tensor) and latents_BFCHW.is_floating_point()
        dtype = latents_BFCHW.dtype if is_float else torch.float32
        _check(codec, "encode", latents_BFCHW, want=_form(dtype, shape))
        return latents_BFCHW


def _check(codec: VideoCodec, call: str, given: object, *, want: str) -> None:
    got = type(given).__name__
    if isinstance(given, Tensor):
        got = _form(given.dtype, tuple(given.shape))
    if got != want:
        what = f"codec {type(codec).__name__}: what {call} gives"
        raise UserInputError(mismatch(what, got=got, want=want, fix="correct it, or its sizes"))


def _form(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
