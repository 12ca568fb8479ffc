"""The parts of a model among the files of a listing, each told by two tensors that no other has."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import PurePosixPath

import torch

from scope_rt.models.original_names import is_wrapped, unwrapped
from scope_rt.tensor_files.listing import Listing, StateForm


class Kind(StrEnum):
    """What a state dict is."""

    TRANSFORMER = "transformer"
    LORA = "LoRA"
    VAE = "VAE"
    TEXT_ENCODER = "text encoder"


class Naming(StrEnum):
    """Whose names its tensors have; of a text encoder, `DIFFUSERS` means those of transformers."""

    ORIGINAL = "original"
    DIFFUSERS = "diffusers"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPart:
    """One state dict, or the shards of one folder together."""

    kind: Kind
    naming: Naming
    files: tuple[str, ...]
    key: str
    """Under which it stands in its file; "" where the file is the state dict."""
    dtypes: frozenset[torch.dtype]
    num_blocks: int
    sized: str
    """The tensor whose shape has the width; "" of a LoRA."""
    width: int
    """Channels of a transformer, of a VAE's latents, of a text encoder's rows; 0 of a LoRA."""
    text_width: int
    """That a transformer takes; 0 of other parts."""
    latent_channels: int
    """The same of latents."""
    is_prefixed: bool
    """Whether names begin with what the model was an attribute of."""
    is_wrapped: bool
    """Whether names have a trainer's wrappers inside, such as `_fsdp_wrapped_module.`."""

    def __str__(self) -> str:
        return f"{self.files[0]}: {self.key}" if self.key else self.files[0]


_MARKS = {
    (Kind.TRANSFORMER, Naming.ORIGINAL): ("patch_embedding.weight", "text_embedding.0.weight"),
    (Kind.TRANSFORMER, Naming.DIFFUSERS): (
        "patch_embedding.weight",
        "condition_embedder.text_embedder.linear_1.weight",
    ),
    (Kind.VAE, Naming.ORIGINAL): ("conv2.weight", "decoder.conv1.weight"),
    (Kind.VAE, Naming.DIFFUSERS): ("post_quant_conv.weight", "decoder.conv_in.weight"),
    (Kind.TEXT_ENCODER, Naming.ORIGINAL): (
        "token_embedding.weight",
        "blocks.0.pos_embedding.embedding.weight",
    ),
    (Kind.TEXT_ENCODER, Naming.DIFFUSERS): ("shared.weight", "encoder.final_layer_norm.weight"),
}
"""Two tensors that a part has and no other has both; the shape of the first has the width."""
_LORA = re.compile(r"\.lora_(A|B|down|up)\.")
_BLOCK = re.compile(r"(?:^|\.)blocks?\.(\d+)\.")
TAKEN_KEYS = ("generator_ema", "generator", "model", "generator_lora", "")
"""Of state dicts that are streamed or merged; others are a trainer's own, as a critic is."""
_INDEX = ".safetensors.index.json"


def parts_of(listing: Listing) -> list[FoundPart]:
    """All parts that could be streamed, decoded or encoded with, in the order of their files."""
    return [part for states in _together(listing) if (part := _part(states)) is not None]


def _together(listing: Listing) -> Iterator[list[StateForm]]:
    """State dicts that are one: the shards of a folder with an index; each other is by itself."""
    indexed = {folder_of(name) for name in listing.names if name.endswith(_INDEX)}
    for folder, states in groupby(listing.states, key=lambda state: folder_of(state.file)):
        if folder in indexed:
            yield list(states)
        else:
            yield from ([state] for state in states if state.key in TAKEN_KEYS)


def is_lora(state: StateForm) -> bool:
    return any(_LORA.search(name) for name in state.tensors)


def folder_of(name: str) -> str:
    return str(PurePosixPath(name).parent)


def _part(states: Sequence[StateForm]) -> FoundPart | None:
    stored = {name: form for state in states for name, form in state.tensors.items()}
    shapes = {unwrapped(name): form.shape for name, form in stored.items()}
    told = next((marks for marks in _MARKS.items() if shapes.keys() >= set(marks[1])), None)
    if told is None and not any(map(is_lora, states)):
        return None
    (kind, naming), (sized, other) = told or ((Kind.LORA, Naming.ORIGINAL), ("", ""))
    is_transformer, width_axis = kind is Kind.TRANSFORMER, int(kind is Kind.TEXT_ENCODER)
    return FoundPart(
        kind=kind,
        naming=naming,
        files=tuple(state.file for state in states),
        key=states[0].key,
        dtypes=frozenset(form.dtype for form in stored.values()),
        num_blocks=len({block[1] for name in shapes if (block := _BLOCK.search(name))}),
        sized=sized,
        width=_size(shapes[sized], width_axis) if sized else 0,
        latent_channels=_size(shapes[sized], 1) if is_transformer else 0,
        text_width=_size(shapes[other], 1) if is_transformer else 0,
        is_prefixed=bool(sized) and sized not in stored,
        is_wrapped=any(map(is_wrapped, stored)),
    )


def _size(shape: tuple[int, ...], axis: int) -> int:
    return shape[axis] if axis < len(shape) else 0
