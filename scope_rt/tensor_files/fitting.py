"""Tensors of files become the weights of a module only where every name and every shape agrees."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from scope_contracts.errors import UserInputError
from scope_rt.part_place import PartPlace
from scope_rt.tensor_files.stored_tensor import WHOLE, Shard


class TensorInFile(Protocol):
    """A tensor, where it lies, and its name there."""

    @property
    def path(self) -> Path: ...

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, shard: Shard = WHOLE) -> Tensor:
        """The part that `shard` names, in memory of its own, in the dtype of the file, on the
        CPU."""
        ...


def check_fit(
    needed: Mapping[str, tuple[int, ...]], have: Mapping[str, TensorInFile], *, where: str
) -> None:
    """Compare names and shapes with what is needed.

    Args:
        where: the beginning of the sentence: which file or folder, and what it does not fit.

    Raises:
        UserInputError: one sentence that names the first tensor of each kind of difference.
    """
    missing = [name for name in needed if name not in have]
    unexpected = [tensor for name, tensor in have.items() if name not in needed]
    other_shape = [name for name in needed if name in have and have[name].shape != needed[name]]
    wrong = []
    if missing:
        wrong.append(f"{len(missing)} missing, {missing[0]!r} first")
    if unexpected:
        first = unexpected[0]
        wrong.append(f"{len(unexpected)} unexpected, {first.name!r} in {first.path.name} first")
    if other_shape:
        first, want = have[other_shape[0]], list(needed[other_shape[0]])
        wrong.append(
            f"{len(other_shape)} of another shape, {first.name!r} in {first.path.name} first: "
            f"got {list(first.shape)}, want {want}"
        )
    if wrong:
        raise UserInputError(
            f"{where}: {'; '.join(wrong)}; copy it again, with all files from one model"
        )


def fill(
    module: nn.Module,
    have: Mapping[str, TensorInFile],
    *,
    where: str,
    place: PartPlace,
) -> None:
    """Give `module`, made on the meta device, the tensors that bear its parameters' names.

    One that is offloaded lies on the CPU. The host holds one tensor beside those that stay. A
    module that stands at two places has its parameters once.

    Raises:
        UserInputError: they do not fit, or cannot be read.
    """
    check_fit(
        {name: tuple(parameter.shape) for name, parameter in module.named_parameters()},
        have,
        where=where,
    )
    device = torch.device("cpu") if place.offload else place.device
    weights = {name: tensor.read().to(device, place.dtype) for name, tensor in have.items()}
    module.load_state_dict(weights, assign=True, strict=False)  # just checked, in our own words
    module.requires_grad_(False).eval()
