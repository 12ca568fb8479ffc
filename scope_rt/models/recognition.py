"""What a folder or a file is: its parts, the family its transformer may be of, and what is missing.

All of it follows from names, shapes and dtypes of tensors, and names of files: nothing is loaded.
Where several families have the same files, all are named, and whoever asks says which is meant.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from scope_rt.models.found_parts import (
    TAKEN_KEYS,
    FoundPart,
    Kind,
    Naming,
    folder_of,
    is_lora,
    parts_of,
)
from scope_rt.tensor_files.listing import Listing


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """A model as its files tell it."""

    families: tuple[str, ...]
    """That it may be of; none is known for a transformer that nobody publishes so."""
    with_lora: tuple[str, ...]
    """Others that it may be of, were there a LoRA."""
    transformers: tuple[FoundPart, ...]
    """Those that could be streamed; where there are several, a recipe says which."""
    loras: tuple[FoundPart, ...]
    lora_files: tuple[str, ...]
    """With a LoRA under any key."""
    vaes: tuple[FoundPart, ...]
    text_encoders: tuple[FoundPart, ...]
    """Several where one lies there in several formats."""
    tokenizers: tuple[str, ...]
    problems: tuple[str, ...]
    """Sentences; it can be loaded where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signs:
    """The file of a family's transformer, as its project publishes it."""

    family: str
    suffix: str
    key: str
    is_wrapped: bool = False
    has_lora: bool = False

    def fit(self, part: FoundPart, *, has_lora: bool) -> bool:
        mine = (self.suffix, self.key, self.is_wrapped, self.has_lora)
        suffix = PurePosixPath(part.files[0]).suffix
        return mine == (suffix, part.key, part.is_wrapped, has_lora) and part.is_prefixed


_FAMILIES = (
    _Signs(family="self-forcing-1.3b", suffix=".pt", key="generator_ema"),
    _Signs(family="longlive-1.3b", suffix=".pt", key="generator", has_lora=True),
    _Signs(family="causal-forcing-1.3b", suffix=".pt", key="generator_ema", is_wrapped=True),
    _Signs(family="causal-forcing-1.3b", suffix=".pt", key="generator"),
    _Signs(family="causal-forcing-chunk-1.3b", suffix=".pt", key="generator"),
    _Signs(family="causvid-1.3b", suffix=".pt", key="generator"),
    _Signs(family="krea-14b", suffix=".safetensors", key=""),
)
_CLASSES: Mapping[str, str] = {"CausalWanTransformer3DModel": "fastvideo-1.3b"}
"""Of `transformer/config.json`, to the family whose steps its weights were distilled with."""


_TOKENIZER = "tokenizer.json"
_BESIDE = "google/umt5-xxl/ or tokenizer/ beside the text encoder"
_VAE = "vae/ as diffusers writes it, or Wan2.1_VAE.pth"
_TEXT_ENCODER = "text_encoder/ as diffusers writes it, or models_t5_umt5-xxl-enc-bf16.pth"


def recognised(listing: Listing, only: str | None = None) -> Recognised:
    """Tell what the files of a listing are. Pure: looks at nothing but the listing.

    Args:
        only: the file whose transformer is meant, where others are none of the model.
    """
    parts = parts_of(listing)
    found = {kind: [part for part in parts if part.kind is kind] for kind in Kind}
    # Beside a checkpoint, the model of an original folder is the one it was made from.
    transformers = [
        each
        for each in found[Kind.TRANSFORMER]
        if (not _is_base(each) if only is None else only in each.files)
    ]
    vaes, texts = found[Kind.VAE], found[Kind.TEXT_ENCODER]
    tokenizers = [name for name in listing.names if PurePosixPath(name).name == _TOKENIZER]
    problems = [
        why
        for (file, key), why in listing.unreadable.items()
        if key in TAKEN_KEYS and (only is None or only == file or _is_no_transformer(file))
    ]
    if not transformers:
        problems.append(_no_transformer(listing, found[Kind.TRANSFORMER]))
    if not vaes:
        problems.append(f"{listing.root}: no VAE; add {_VAE}")
    if not texts:
        problems.append(f"{listing.root}: no text encoder; add {_TEXT_ENCODER}")
    if not tokenizers:
        problems.append(f"{listing.root}: no tokenizer; add umT5's {_TOKENIZER} in {_BESIDE}")
    lora_files = tuple(dict.fromkeys(each.file for each in listing.states if is_lora(each)))
    problems += _misfits(transformers, vaes, texts)
    problems += _not_floats(listing, parts)
    families = _families(listing, transformers, has_lora=bool(lora_files))
    others = () if lora_files else _families(listing, transformers, has_lora=True)
    return Recognised(
        families=families,
        with_lora=tuple(name for name in others if name not in families),
        transformers=tuple(transformers),
        loras=tuple(found[Kind.LORA]),
        lora_files=lora_files,
        vaes=tuple(vaes),
        text_encoders=tuple(texts),
        tokenizers=tuple(tokenizers),
        problems=tuple(problems),
    )


def _is_no_transformer(file: str) -> bool:
    """Whether a file that cannot be read is, by its name, none of the transformers."""
    return not file.endswith((".pt", ".ckpt"))


def class_family(class_name: object) -> tuple[str, ...]:
    """The family of a `transformer/config.json` of that class; none where it tells none."""
    family = _CLASSES.get(class_name) if isinstance(class_name, str) else None
    return () if family is None else (family,)


def _is_base(part: FoundPart) -> bool:
    """Whether it is published as Wan's own model is, which no recipe streams."""
    return part.naming is Naming.ORIGINAL and not part.key and not part.is_prefixed


def _families(
    listing: Listing, transformers: Sequence[FoundPart], *, has_lora: bool
) -> tuple[str, ...]:
    families = dict[str, None]()  # in order, each once
    for part in transformers:
        config = listing.configs.get(f"{folder_of(part.files[0])}/config.json", {})
        families |= dict.fromkeys(class_family(config.get("_class_name")))
        families |= {each.family: None for each in _FAMILIES if each.fit(part, has_lora=has_lora)}
    return tuple(families)


def _no_transformer(listing: Listing, bases: Sequence[FoundPart]) -> str:
    others = [f"{state.key!r} in {state.file}" for state in listing.states if state.key]
    beside = f" (there is {', '.join(others[:3])})" if others else ""
    wanted = ", ".join(map(repr, TAKEN_KEYS[:3]))
    if bases:
        return (
            f"{listing.root}: no causal transformer{beside}, only Wan's own in {bases[0]}; add the "
            f"file of the project that made it causal, which has it under one of {wanted}"
        )
    return (
        f"{listing.root}: no transformer{beside}; add transformer/ as diffusers writes it, or a "
        f"project's own file, which has it under one of {wanted}"
    )


def _misfits(
    transformers: Sequence[FoundPart], vaes: Sequence[FoundPart], texts: Sequence[FoundPart]
) -> Iterator[str]:
    """The parts that are not of one model."""
    for transformer in transformers:
        for part, want in (
            *((vae, transformer.latent_channels) for vae in vaes),
            *((text, transformer.text_width) for text in texts),
        ):
            if part.width != want:
                yield (
                    f"{part}: this {part.kind} is {part.width} wide by its {part.sized}, and "
                    f"{transformer} takes {want}; bring the parts of one model together"
                )


def _not_floats(listing: Listing, parts: Sequence[FoundPart]) -> Iterator[str]:
    """The first tensor of each part's file that can be no weight."""
    places = {(file, part.key) for part in parts for file in part.files}
    for state in listing.states:
        wrong = [name for name, form in state.tensors.items() if not form.dtype.is_floating_point]
        if wrong and (state.file, state.key) in places:
            yield (
                f"{state.file}: {wrong[0]} is {state.tensors[wrong[0]].dtype}, want a tensor of "
                "floating-point numbers; copy the checkpoint's own file"
            )
