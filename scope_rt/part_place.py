"""Where a codec or a text encoder computes, and in which numbers: settings of their own."""

from dataclasses import dataclass

import torch

from scope_contracts.errors import UserInputError, mismatch

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlace:
    """Of one part. What goes into it and comes out lies on the CPU in any case."""

    device: torch.device = _CPU
    dtype: torch.dtype = torch.float32
    offload: bool = False
    """Whether its weights lie on the CPU between two uses."""


HERE = PartPlace()
"""On the CPU, in float32."""


def place_of(
    name: str,
    *,
    device: str | None,
    dtype: torch.dtype | None,
    own: torch.device,
    offload: bool = False,
) -> PartPlace:
    """The place that was asked for; by default on `own`, the rank's device, and there in float32 on
    a CPU and in bfloat16 on a GPU.

    Raises:
        UserInputError: there is no such device, or the dtype is no float.
    """
    asked = own if device is None else _device(name, device)
    if dtype is None:
        dtype = torch.float32 if asked.type == "cpu" else torch.bfloat16
    if not dtype.is_floating_point:
        raise UserInputError(mismatch(f"{name}_dtype", got=dtype, want="a float, such as float32"))
    return PartPlace(device=asked, dtype=dtype, offload=offload and asked.type != "cpu")


def _device(name: str, text: str) -> torch.device:
    what, num_gpus = f"{name}_device", torch.cuda.device_count()
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserInputError(mismatch(what, got=text, want="cpu, cuda, or one such as cuda:0"))
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise UserInputError(mismatch(what, got=text, want=f"one of the {num_gpus} GPUs here"))
    return device
