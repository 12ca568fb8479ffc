"""What a rank made is replaced by something of the same shape, which nobody computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scope_contracts.envelope import LATENTS_OUT, PPResult

Answer = tuple[PPResult, dict[str, Tensor]]


def _fill_latents(answer: Answer, *, value: float) -> Answer:
    """All of them are `value`."""
    result, tensors = answer
    return result, tensors | {LATENTS_OUT: torch.full_like(tensors[LATENTS_OUT], value)}


def _repeat_latents(answer: Answer, earlier: Answer) -> Answer:
    """They are those of the chunk before, in the answer to this one."""
    result, tensors = answer
    return result, tensors | {LATENTS_OUT: earlier[1][LATENTS_OUT]}


def _blank(frames_BTHWC: Tensor) -> Tensor:
    """The picture is black."""
    return torch.zeros_like(frames_BTHWC)


ACTIONS: dict[str, Callable[..., Any]] = {
    "fill_latents": _fill_latents,
    "blank": _blank,
}
RECALLING_ACTIONS: dict[str, Callable[..., Any]] = {"repeat_latents": _repeat_latents}
