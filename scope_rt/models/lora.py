"""A LoRA is part of the weights from the start: each slice is merged when it is read, in float32.

Names may be those of peft, of LongLive, or kohya's. Which weight a name means follows from the
model's own names, original or diffusers', with or without what the model was an attribute of.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.models.family import LoraPlace
from scope_rt.models.original_names import diffusers_name
from scope_rt.tensor_files.fitting import TensorInFile
from scope_rt.tensor_files.state_dict import state_dict_of
from scope_rt.tensor_files.stored_tensor import WHOLE, Shard
from scope_rt.tensor_files.torch_file import TorchFile

_PREFIX = re.compile(
    r"^(lora_unet_|lora_transformer_|"
    r"((base_model|diffusion_model|transformer|generator|model|net)\.)+)"
)
_FACTOR = re.compile(r"\.lora_(A|B|down|up)(\.default)?\.weight$")
_OTHER = {"A": "B", "B": "A", "down": "up", "up": "down"}
_ALPHA = ".alpha"
_BLOCK = re.compile(r"blocks\.(\d+)\.")
_LINEARS = (
    *(f"{attention}.{each}" for attention in ("self_attn", "cross_attn") for each in "qkvo"),
    "ffn.0",
    "ffn.2",
)
_OUTSIDE = (
    "text_embedding.0",
    "text_embedding.2",
    "time_embedding.0",
    "time_embedding.2",
    "time_projection.1",
    "head.head",
)
_FIX = "copy the project's own LoRA"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What is added to one weight: `scale * B @ A`."""

    a: TensorInFile
    b: TensorInFile
    scale: float

    def merged(self, part: Tensor, shard: Shard) -> Tensor:
        """`part` of the weight with its share of the LoRA, float32, where `part` is."""
        rows = shard if shard.axis == 0 else WHOLE
        columns = shard if shard.axis == 1 else WHOLE
        a, b = (
            factor.read(piece).to(part.device, torch.float32)
            for factor, piece in ((self.a, columns), (self.b, rows))
        )
        return torch.addmm(part.float(), b, a, alpha=self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """A LoRA in a file, by the diffusers name of each weight that it changes."""

    path: Path
    weights: Mapping[str, LowRank]

    @classmethod
    def open(
        cls,
        path: Path,
        key: str,
        place: LoraPlace,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        said_in: str,
    ) -> Self:
        """Read the names and shapes of the LoRA under `key` of a file, "" for one that is it.

        Args:
            place: what its recipe says of rank and alpha.
            shapes: of the model's weights, by diffusers' names.
            said_in: whose word that is.

        Raises:
            UserInputError: it is another model's, or not whole; names the tensor.
        """
        stored = TorchFile.open(path).tensors(key) if key else state_dict_of(path)
        factors, alphas = _sorted_out(path, stored)
        known, weights = _names(shapes), dict[str, LowRank]()
        for module, pair in factors.items():
            target = known.get(_canonical(module))
            if target is None:
                raise UserInputError(f"{path}: the model has no layer for {module}; {_FIX}")
            if target in weights:
                raise UserInputError(
                    f"{path}: {module} is a layer that has another LoRA in it; {_FIX}"
                )
            a, b = _both(path, module, pair)
            _check_shapes(path, a, b, shapes[target])
            rank, alpha = a.shape[0], place.alpha
            if (own := alphas.pop(module, None)) is not None:
                alpha = _number(own)
            elif place.rank not in (None, rank):
                what, want = (
                    f"{path}: rank of {a.name} {list(a.shape)}",
                    f"{place.rank}, by {said_in}",
                )
                fix = f"{_FIX}, or write this one's rank and alpha in [lora] of a .toml file"
                raise UserInputError(mismatch(what, got=rank, want=want, fix=fix))
            weights[target] = LowRank(a=a, b=b, scale=alpha / rank)
        if alphas:
            first = next(iter(alphas.values()))
            raise UserInputError(f"{path}: {first.name} is the alpha of no LoRA in it; {_FIX}")
        if not weights:
            raise UserInputError(f"{path} has no LoRA of linear layers; {_FIX}")
        if place.all_blocks:
            _check_blocks(path, weights, shapes)
        return cls(path=path, weights=weights)


def _sorted_out(
    path: Path, stored: Mapping[str, TensorInFile]
) -> tuple[dict[str, dict[str, TensorInFile]], dict[str, TensorInFile]]:
    """The factors of each layer by their side, and the alphas, by what a layer is called there."""
    factors, alphas = dict[str, dict[str, TensorInFile]](), dict[str, TensorInFile]()
    for name, tensor in stored.items():
        if name.endswith(_ALPHA):
            alphas[name.removesuffix(_ALPHA)] = tensor
        elif found := _FACTOR.search(name):
            side = "A" if found[1] in ("A", "down") else "B"
            pair = factors.setdefault(name[: found.start()], {})
            if (other := pair.setdefault(side, tensor)) is not tensor:
                raise UserInputError(f"{path}: {other.name} and {name} are one factor; {_FIX}")
        else:
            raise UserInputError(f"{path}: {name} is no part of a LoRA of linear layers; {_FIX}")
    return factors, alphas


def _check_blocks(
    path: Path, weights: Mapping[str, LowRank], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse half a file: a layer that is changed in one block is changed in all of them."""
    for name, low_rank in weights.items():
        if not (block := _BLOCK.match(name)):
            continue
        others = (f"blocks.{number}.{name[block.end() :]}" for number in _blocks(shapes))
        if lacking := next((other for other in others if other not in weights), None):
            raise UserInputError(
                f"{path}: there is {low_rank.a.name} and nothing for the same layer of block "
                f"{lacking.split('.')[1]}; {_FIX}, or say all_blocks = false in [lora] of a recipe "
                "for one that was made so"
            )


def _both(path: Path, module: str, pair: Mapping[str, TensorInFile]) -> tuple[TensorInFile, ...]:
    for side, other in ("AB", "BA"):
        if side not in pair:
            there, found = pair[other].name, _FACTOR.search(pair[other].name)
            assert found is not None, "by which it is a factor"
            lacking = f"{there[: found.start(1)]}{_OTHER[found[1]]}{there[found.end(1) :]}"
            raise UserInputError(f"{path}: {lacking} is missing beside {there}; {_FIX}")
    return pair["A"], pair["B"]


def _number(alpha: TensorInFile) -> float:
    what = f"{alpha.path}: {alpha.name}"
    if alpha.shape not in ((), (1,)):
        raise UserInputError(mismatch(what, got=list(alpha.shape), want="one number", fix=_FIX))
    if not 0 < (number := float(alpha.read())) < inf:
        raise UserInputError(mismatch(what, got=number, want="a number above 0", fix=_FIX))
    return number


def _check_shapes(path: Path, a: TensorInFile, b: TensorInFile, weight: tuple[int, ...]) -> None:
    num_out, num_in = weight
    rank = a.shape[0] if a.shape else 0
    for factor, want in ((a, (rank, num_in)), (b, (num_out, rank))):
        if not rank or tuple(factor.shape) != want:
            fits = f"{list(want)}" if rank else "a rank of at least 1"
            got, wanted = list(factor.shape), f"{fits}, of a layer of {list(weight)}"
            raise UserInputError(mismatch(f"{path}: {factor.name}", got=got, want=wanted, fix=_FIX))


def _names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The diffusers name of each linear layer's weight, by all that a LoRA may call the layer."""
    inside = [f"blocks.{block}.{linear}" for block in _blocks(shapes) for linear in _LINEARS]
    found = dict[str, str]()
    for original in (*inside, *_OUTSIDE):
        weight = diffusers_name(f"{original}.weight")
        found[_canonical(original)] = weight
        found[_canonical(weight.removesuffix(".weight"))] = weight
    return found


def _blocks(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Their numbers."""
    return list(dict.fromkeys(found[1] for name in shapes if (found := _BLOCK.match(name))))


def _canonical(module: str) -> str:
    """Kohya writes a name's dots as underscores."""
    return _PREFIX.sub("", module).replace(".", "_")
