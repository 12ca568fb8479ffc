"""Weights in the original Wan naming load as the same model under diffusers' names."""

import re
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")
_PREFIXES = re.compile(r"^((model|generator|diffusion_model|module|net|transformer)\.)+")
"""Attributes of trainers and servers that the model stands in."""
_INSIDE = re.compile(r"_(fsdp_wrapped_module|checkpoint_wrapped_module|orig_mod)\.")
"""What sharding, checkpointing and compiling put between any two parts of a name."""

RENAMES = (
    ("text_embedding.0.", "condition_embedder.text_embedder.linear_1."),
    ("text_embedding.2.", "condition_embedder.text_embedder.linear_2."),
    ("time_embedding.0.", "condition_embedder.time_embedder.linear_1."),
    ("time_embedding.2.", "condition_embedder.time_embedder.linear_2."),
    ("time_projection.1.", "condition_embedder.time_proj."),
    ("head.modulation", "scale_shift_table"),
    ("head.head.", "proj_out."),
    (".modulation", ".scale_shift_table"),
    (".self_attn.", ".attn1."),
    (".cross_attn.", ".attn2."),
    (".q.", ".to_q."),
    (".k.", ".to_k."),
    (".v.", ".to_v."),
    (".o.", ".to_out.0."),
    (".norm3.", ".norm2."),
    (".ffn.0.", ".ffn.net.0.proj."),
    (".ffn.2.", ".ffn.net.2."),
)
"""Original part of a name -> diffusers' part, applied in order."""


def is_original(weights: Mapping[str, object]) -> bool:
    """Whether `weights` carry the names of Wan's own repository."""
    return any(".self_attn." in name for name in weights)


def is_wrapped(name: str) -> bool:
    """Whether a trainer's wrappers stand inside the name."""
    return _INSIDE.search(name) is not None


def unwrapped(name: str) -> str:
    """The name that a parameter has in the model itself, whatever that was wrapped in."""
    return _PREFIXES.sub("", _INSIDE.sub("", name))


def diffusers_name(name: str) -> str:
    """The diffusers name of one original parameter."""
    name = unwrapped(name)
    for original, renamed in RENAMES:
        name = name.replace(original, renamed)
    return name


def to_diffusers(weights: Mapping[str, T]) -> dict[str, T]:
    """All weights (or what is known of them) under diffusers' names; those are left alone."""
    if not is_original(weights):
        return dict(weights)
    return {diffusers_name(name): weight for name, weight in weights.items()}
