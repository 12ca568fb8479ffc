"""What rank0 holds, encodes, decodes or hands out becomes something else, of the same shape."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scope_contracts.envelope import PPEnvelope
from scope_rt.control.chunk import Arrived, Chunk
from scope_rt.control.inbox import Directive, Taken
from scope_rt.vae.checked import CheckedDecoder

Planned = tuple[PPEnvelope, dict[str, Tensor]]
_NUDGE = 1e-3


def _lose_control(taken: Taken) -> Taken:
    """A chunk is planned as if nothing had been asked for."""
    return replace(taken, directive=Directive())


def _nudge_arrived(arrived: Arrived) -> Arrived:
    """Latents that were checked already."""
    return replace(arrived, latents=arrived.latents + _NUDGE)


def _scale_tensor(planned: Planned, *, name: str, by: float) -> Planned:
    """A tensor that rank0 is about to send."""
    envelope, tensors = planned
    return envelope, tensors | {name: tensors[name] * by}


def _scale_embeds(embeds: Tensor, *, by: float) -> Tensor:
    """What the text encoder made of a prompt, once."""
    return embeds * by


@torch.inference_mode()
def _scale_codec_weight(decoder: CheckedDecoder, *, by: float) -> CheckedDecoder:
    """The codec's largest weight."""
    codec = decoder.codec
    assert isinstance(codec, nn.Module), "a codec that has weights"
    max(codec.parameters(), key=Tensor.numel).mul_(by)
    return decoder


def _dim_highlights(decoder: CheckedDecoder) -> CheckedDecoder:
    """Every decoder of the codec gives nothing brighter than three quarters, from now on."""
    codec: Any = decoder.codec
    decode = codec.decode
    codec.decode = lambda *latents: decode(*latents).clamp(max=0.5)
    return decoder


def _reset_decoder(decoder: CheckedDecoder) -> CheckedDecoder:
    """In the middle of an epoch."""
    decoder.reset()
    return decoder


def _shift_frames(frames_BTHWC: Tensor) -> Tensor:
    """The picture is one pixel to the right."""
    return frames_BTHWC.roll(1, 3)


def _show_earlier(chunk: Chunk, earlier: Chunk) -> Chunk:
    """The pictures of the chunk before, again."""
    return replace(chunk, frames=earlier.frames)


ACTIONS: dict[str, Callable[..., Any]] = {
    "lose_control": _lose_control,
    "nudge_arrived": _nudge_arrived,
    "scale_tensor": _scale_tensor,
    "scale_embeds": _scale_embeds,
    "scale_codec_weight": _scale_codec_weight,
    "dim_highlights": _dim_highlights,
    "reset_decoder": _reset_decoder,
    "shift_frames": _shift_frames,
}
RECALLING_ACTIONS: dict[str, Callable[..., Any]] = {
    "show_earlier": _show_earlier,
}
