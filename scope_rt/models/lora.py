"""A LoRA is part of the weights from the start: each slice is merged when it is read, in float32.

Names may be those of peft, of LongLive, or kohya's. Which weight a name means follows from the
model's own names, original or diffusers', with or without what the model was an attribute of.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
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
        cls, path: Path, key: str, place: LoraPlace, shapes: Mapping[str, tuple[int, ...]]
    ) -> Self:
        """Read the names and shapes of the LoRA under `key` of a file, "" for one that is it.

        Args:
            place: what its recipe says of rank and alpha.
            shapes: of the model's weights, by diffusers' names.

        Raises:
            UserInputError: it is another model's, or not whole; names the tensor.
        """
        stored = TorchFile.open(path).tensors(key) if key else state_dict_of(path)
        known, factors = _names(shapes), dict[str, dict[str, TensorInFile]]()
        alphas = dict[str, TensorInFile]()
        for name, tensor in stored.items():
            if name.endswith(_ALPHA):
                alphas[name.removesuffix(_ALPHA)] = tensor
            elif found := _FACTOR.search(name):
                side = "A" if found[1] in ("A", "down") else "B"
                factors.setdefault(name[: found.start()], {})[side] = tensor
            else:
                raise UserInputError(
                    f"{path}: {name} is no part of a LoRA of linear layers; {_FIX}"
                )
        weights = dict[str, LowRank]()
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
            if (own := alphas.get(module)) is not None:
                alpha = _number(own)
            elif rank != place.rank:
                want = f"rank {place.rank}, as the recipe or the project's configuration says"
                got = f"{list(a.shape)}, which is rank {rank}"
                raise UserInputError(mismatch(f"{path}: {a.name}", got=got, want=want, fix=_FIX))
            weights[target] = LowRank(a=a, b=b, scale=alpha / rank)
        if not weights:
            raise UserInputError(f"{path} has no LoRA of linear layers; {_FIX}")
        return cls(path=path, weights=weights)


def _both(path: Path, module: str, pair: Mapping[str, TensorInFile]) -> tuple[TensorInFile, ...]:
    for side, other in ("AB", "BA"):
        if side not in pair:
            there, found = pair[other].name, _FACTOR.search(pair[other].name)
            assert found is not None, "by which it is a factor"
            lacking = f"{there[: found.start(1)]}{_OTHER[found[1]]}{there[found.end(1) :]}"
            raise UserInputError(f"{path}: {lacking} is missing beside {there}; {_FIX}")
    return pair["A"], pair["B"]


def _number(alpha: TensorInFile) -> float:
    if alpha.shape not in ((), (1,)):
        what, got = f"{alpha.path}: {alpha.name}", list(alpha.shape)
        raise UserInputError(mismatch(what, got=got, want="one number", fix=_FIX))
    return float(alpha.read())


def _check_shapes(path: Path, a: TensorInFile, b: TensorInFile, weight: tuple[int, ...]) -> None:
    num_out, num_in = weight
    rank = a.shape[0] if a.shape else 0
    for factor, want in ((a, (rank, num_in)), (b, (num_out, rank))):
        if not rank or tuple(factor.shape) != want:
            got, wanted = list(factor.shape), f"{list(want)}, of a layer of {list(weight)}"
            raise UserInputError(mismatch(f"{path}: {factor.name}", got=got, want=wanted, fix=_FIX))


def _names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The diffusers name of each linear layer's weight, by all that a LoRA may call the layer."""
    blocks = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    inside = [f"blocks.{block}.{linear}" for block in sorted(blocks) for linear in _LINEARS]
    found = dict[str, str]()
    for original in (*inside, *_OUTSIDE):
        weight = diffusers_name(f"{original}.weight")
        found[_canonical(original)] = weight
        found[_canonical(weight.removesuffix(".weight"))] = weight
    return found


def _canonical(module: str) -> str:
    """Kohya writes a name's dots as underscores."""
    return _PREFIX.sub("", module).replace(".", "_")
