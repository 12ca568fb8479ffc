"""Prompts of the embedded model's world: one grammar, one meaning, whatever the word order.

Every known word belongs to exactly one kind, and a scene keeps its objects in one canonical order,
so two prompts that mean the same have bit-equal embeddings.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scope_contracts.errors import UserInputError, shown

MAX_OBJECTS = 2
WEIGHTS_NAME = "model.safetensors"


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"
    YELLOW = "yellow"
    PURPLE = "purple"
    WHITE = "white"


class Shape(StrEnum):
    CIRCLE = "circle"
    SQUARE = "square"
    TRIANGLE = "triangle"


class Speed(StrEnum):
    SLOW = "slow"
    MEDIUM = "medium"
    FAST = "fast"


class Background(StrEnum):
    BLACK = "black"
    NAVY = "navy"
    GRAY = "gray"


NO_OBJECT = "none"
WORDS: tuple[str, ...] = (NO_OBJECT, *Colour, *Shape, *Speed, *Background)
PROMPT_WORDS = tuple(str(word) for word in WORDS[1:])
"""Those that a prompt may name; the grammar's fillers are left out."""
_SYNONYMS = {"grey": Background.GRAY}
_FILLERS = frozenset(
    {"a", "an", "the", "and", "with", "on", "in", "over", "at", "of", "before", "against"}
    | {"is", "are", "one", "both", "moving", "bouncing", "going"}
    | {"background", "backdrop", "speed"}
)


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One thing to be seen."""

    colour: Colour
    shape: Shape

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneSpec:
    """One or two objects of different colours, kept in the order of `Colour`."""

    objects: tuple[SceneObject, ...]
    speed: Speed
    background: Background

    def __post_init__(self) -> None:
        order = list(Colour)
        ordered = tuple(sorted(self.objects, key=lambda thing: order.index(thing.colour)))
        object.__setattr__(self, "objects", ordered)


def parse(text: str) -> SceneSpec:
    """Read a prompt such as "a red circle and a blue square, fast, on navy".

    Words may come in any order and case; a colour belongs to the shape it stands next to. Speed
    defaults to medium, background to black.

    Raises:
        UserInputError: a word is unknown, a colour lacks its shape (or the reverse), there is no
            object or more than two, or two objects share a colour.
    """
    things: list[Colour | Shape] = []
    speeds: set[Speed] = set()
    backgrounds: set[Background] = set()
    for token in re.findall(r"\w+", text.lower()):
        word = _SYNONYMS.get(token, token)
        if word in tuple(Colour):
            things.append(Colour(word))
        elif word in tuple(Shape):
            things.append(Shape(word))
        elif word in tuple(Speed):
            speeds.add(Speed(word))
        elif word in tuple(Background):
            backgrounds.add(Background(word))
        elif word not in _FILLERS:
            raise UserInputError(
                f"prompt: unknown word {shown(token)}{_guess(word)}; {_known_words()}"
            )
    for kind, named in (("speed", speeds), ("background", backgrounds)):
        if len(named) > 1:
            raise UserInputError(f"prompt: more than one {kind} ({_join(named)}); name one")
    return SceneSpec(
        objects=_pair(things),
        speed=speeds.pop() if speeds else Speed.MEDIUM,
        background=backgrounds.pop() if backgrounds else Background.BLACK,
    )


def _pair(things: Sequence[Colour | Shape]) -> tuple[SceneObject, ...]:
    objects: list[SceneObject] = []
    for index in range(0, len(things), 2):
        match things[index : index + 2]:
            case [Colour() as colour, Shape() as shape] | [Shape() as shape, Colour() as colour]:
                objects.append(SceneObject(colour, shape))
            case [Colour() as colour, *_]:
                raise UserInputError(
                    f"prompt: {str(colour)!r} has no shape next to it; write '{colour} circle', "
                    f"or choose a background among {_join(Background)}"
                )
            case [word, *_]:
                raise UserInputError(
                    f"prompt: {str(word)!r} has no colour next to it; write 'red {word}'"
                )
    colours = {thing.colour for thing in objects}
    if len(colours) < len(objects):
        raise UserInputError("prompt: two objects of one colour; give each its own colour")
    if not 1 <= len(objects) <= MAX_OBJECTS:
        raise UserInputError(
            f"prompt: {len(objects)} objects, want 1 or {MAX_OBJECTS}, each a colour and a shape, "
            "such as 'a red circle and a blue square'"
        )
    return tuple(objects)


def _join(words: Sequence[str] | set[Speed] | set[Background] | type[StrEnum]) -> str:
    return ", ".join(sorted(str(word) for word in words))


def _guess(word: str) -> str:
    close = get_close_matches(word, PROMPT_WORDS, n=1)
    return f" (is it {str(close[0])!r}?)" if close else ""


def _known_words() -> str:
    kinds = {"colours": Colour, "shapes": Shape, "speeds": Speed, "backgrounds": Background}
    listed = "; ".join(f"{kind}: {', '.join(words)}" for kind, words in kinds.items())
    return f"known {listed}"


class WordTextEncoder(nn.Module):
    """Prompt to embeddings, without training: every word is one fixed vector of unit RMS.

    The slots of the output are: first object (colour + shape), second object or "none", speed,
    background, and zero padding.
    """

    def __init__(self, *, text_len: int = 6, text_dim: int = 64) -> None:
        super().__init__()
        self.text_len = text_len
        self.words = nn.Embedding(len(WORDS), text_dim)
        self.words.requires_grad_(False)

    @property
    def text_dim(self) -> int:
        return self.words.embedding_dim

    @classmethod
    def from_seed(cls, seed: int, *, text_len: int = 6, text_dim: int = 64) -> Self:
        """Draw orthogonal word vectors; every number is exact in half precision."""
        encoder = cls(text_len=text_len, text_dim=text_dim)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(text_dim, text_dim, generator=generator, dtype=torch.float64)
        vectors = torch.linalg.qr(drawn).Q[: len(WORDS)] * text_dim**0.5
        encoder.words.weight.copy_(vectors.half())
        return encoder

    @classmethod
    def from_pretrained(cls, folder: Path) -> Self:
        """Load `folder/config.json` and `folder/model.safetensors`.

        Raises:
            UserInputError: the folder is not one that `save_pretrained` wrote.
        """
        try:
            config = json.loads((folder / "config.json").read_text())
            encoder = cls(text_len=config["text_len"], text_dim=config["text_dim"])
            vocabulary = config["words"]
            weights = load_file(folder / WEIGHTS_NAME)
            encoder.load_state_dict({name: weight.float() for name, weight in weights.items()})
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UserInputError(
                f"cannot load a text encoder from {folder}: {str(error)[:200]!r}; point to a model "
                "folder"
            ) from error
        if vocabulary != list(WORDS):
            raise UserInputError(
                f"{folder}: the vocabulary differs from this version's; rebuild the text encoder"
            )
        return encoder

    def save_pretrained(self, folder: Path) -> None:
        """Write the folder that `from_pretrained` reads, in fp16."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "_class_name": type(self).__name__,
            "text_dim": self.text_dim,
            "text_len": self.text_len,
            "words": list(WORDS),
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        halves = {name: weight.half() for name, weight in self.state_dict().items()}
        save_file(halves, folder / WEIGHTS_NAME)

    def forward(self, prompts: Sequence[str]) -> Tensor:
        """Embed prompts: `[B, text_len, text_dim]`.

        Raises:
            UserInputError: a prompt cannot be parsed (see `parse`).
        """
        return self.encode([parse(prompt) for prompt in prompts])

    def encode(self, scenes: Sequence[SceneSpec]) -> Tensor:
        """Embed parsed prompts: `[B, text_len, text_dim]`."""
        return torch.stack([self._embed(scene) for scene in scenes])

    def _embed(self, scene: SceneSpec) -> Tensor:
        slots: list[tuple[str, ...]] = [(thing.colour, thing.shape) for thing in scene.objects]
        slots += [(NO_OBJECT,)] * (MAX_OBJECTS - len(slots))
        slots += [(scene.speed,), (scene.background,)]
        embedded = self.words.weight.new_zeros(self.text_len, self.text_dim)
        for row, words in enumerate(slots):
            embedded[row] = self.words.weight[[WORDS.index(word) for word in words]].sum(0)
        return embedded
