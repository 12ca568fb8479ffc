"""The layers of TAEHV, told from the names and shapes of a published file.

A file numbers the layers of encoder and decoder; those without weights are left out of it, and
follow from where they stand.
"""

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path

from torch import nn

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.tensor_files.fitting import TensorInFile
from scope_rt.vae.small import (
    FRAMES,
    LATENT_CHANNELS,
    STRIDE,
    MemoryBlock,
    MergeFrames,
    SmallAutoencoder,
    SoftClamp,
    SplitFrames,
)

_FIX = "give TAEHV's file for Wan 2.1, taew2_1"
_NUMBERED = re.compile(r"^(encoder|decoder)\.(\d{1,3})\.")
_Shapes = Mapping[str, tuple[int, ...]]


def layers_of(path: Path, tensors: Mapping[str, TensorInFile]) -> SmallAutoencoder:
    """Layers of the sizes that the file has, without its weights.

    Raises:
        UserInputError: it is another file, or of another model's latents.
    """
    shapes = {name: t.shape for name, t in tensors.items() if len(t.shape) in (1, 4)}
    for name, shape in shapes.items():
        if not all(shape) or (len(shape) == 1) is name.endswith("weight"):
            want = "a convolution's weight or bias"
            raise UserInputError(mismatch(f"{path}: {name}", got=list(shape), want=want, fix=_FIX))
    model = SmallAutoencoder(_sequence("encoder", shapes), _sequence("decoder", shapes))
    channels = shapes.get("decoder.1.weight", (0, 0))[1]
    steps = [layer.num for layer in model.encoder if isinstance(layer, MergeFrames)]
    steps_back = [layer.num for layer in model.decoder if isinstance(layer, SplitFrames)]
    sizes: tuple[tuple[str, int, int], ...] = (
        ("decoder.1.weight takes", channels, LATENT_CHANNELS),
        ("pictures of a latent frame in the encoder", prod(steps), FRAMES),
        ("pictures of a latent frame in the decoder", prod(steps_back), FRAMES),
        ("pixels of a latent in the encoder", 2 ** len(steps), STRIDE),
        ("pixels of a latent in the decoder", 2 ** len(steps_back), STRIDE),
    )
    for what, got, number in sizes:
        if got != number:
            raise UserInputError(mismatch(f"{path}: {what}", got=got, want=number, fix=_FIX))
    return model


def _sequence(part: str, shapes: _Shapes) -> nn.Sequential:
    found = (_NUMBERED.match(name) for name in shapes)
    numbers = [int(each[2]) for each in found if each is not None and each[1] == part]
    layers: list[nn.Module] = []
    for number in range(max(numbers, default=-1) + 1):
        after = layers[-1] if layers else None
        layers.append(_layer(part, number, after, shapes))
    return nn.Sequential(*layers)


def _layer(part: str, number: int, after: nn.Module | None, shapes: _Shapes) -> nn.Module:
    name = f"{part}.{number}"
    is_decoder = part == "decoder"
    if (shape := shapes.get(f"{name}.conv.0.weight")) is not None:
        return MemoryBlock(shape[1] // 2, shape[0])
    if (shape := shapes.get(f"{name}.conv.weight")) is not None:
        many, few = max(shape[:2]), min(shape[:2])
        return SplitFrames(few, many // few) if is_decoder else MergeFrames(few, many // few)
    if (shape := shapes.get(f"{name}.weight")) is not None:
        stride = 2 if isinstance(after, MergeFrames) else 1
        is_bare = isinstance(after, MergeFrames | SplitFrames)
        return nn.Conv2d(shape[1], shape[0], 3, stride=stride, padding=1, bias=not is_bare)
    if is_decoder and number == 0:
        return SoftClamp()
    if is_decoder and f"{part}.{number + 1}.conv.weight" in shapes:
        return nn.Upsample(scale_factor=2)
    return nn.ReLU()
