"""A module has the very tensors of the files, or a sentence names the first that does not fit."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scope_contracts.errors import UserInputError
from scope_rt.part_place import HERE, PartPlace
from scope_rt.tensor_files.fitting import TensorInFile, fill
from scope_rt.tensor_files.stored_tensor import WHOLE, Shard

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class InMemory:
    name: str
    tensor: Tensor
    path: Path = Path("folder/file.pth")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, shard: Shard = WHOLE) -> Tensor:
        return shard.of(self.tensor)


def of_linear(**changes: Tensor | None) -> dict[str, TensorInFile]:
    weights = {"weight": torch.randn(2, 3), "bias": torch.randn(2)} | changes
    return {name: InMemory(f"theirs.{name}", t) for name, t in weights.items() if t is not None}


def filled(have: dict[str, TensorInFile], dtype: torch.dtype = torch.float32) -> nn.Linear:
    linear = nn.Linear(3, 2, device="meta")
    fill(linear, have, where="folder: the weights do not fit", place=PartPlace(dtype=dtype))
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_files_in_the_dtype_of_use(dtype: torch.dtype) -> None:
    have = of_linear()
    linear = filled(have, dtype)
    assert torch.equal(linear.weight, have["weight"].read().to(dtype))
    assert torch.equal(linear.bias, have["bias"].read().to(dtype))
    assert not linear.training
    assert not linear.weight.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": None}, "1 missing, 'bias' first"),
        ({"gain": torch.ones(1)}, "1 unexpected, 'theirs.gain' in file.pth first"),
        (
            {"weight": torch.ones(2, 4)},
            r"1 of another shape, 'theirs.weight' in file.pth first: got \[2, 4\], want \[2, 3\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Tensor | None], message: str) -> None:
    with pytest.raises(UserInputError, match=f"^folder: the weights do not fit: {message}; copy"):
        filled(of_linear(**changes))


def test_a_module_at_two_places_has_its_weights_once() -> None:
    linear = nn.Linear(3, 2, device="meta")
    both = nn.ModuleDict({"first": linear, "second": linear})
    have = {f"first.{name}": tensor for name, tensor in of_linear().items()}
    fill(both, have, where="folder", place=HERE)
    assert both["first"].weight is both["second"].weight
    assert torch.equal(linear.weight, have["first.weight"].read())
