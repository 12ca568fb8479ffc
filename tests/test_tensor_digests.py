"""A tensor that is held is known again wherever it is read, and one that changed by its name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scope_rt.tensor_digests import TensorDigests, reader_of
from tests.test_bit_digest import DTYPES, numbers

NAMES = ["0.weight", "0.bias", "1.weight", "1.running_var", "2.weight"]


def module() -> Any:
    """With a buffer, and a weight whose channels lie last."""
    parts: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Conv2d(3, 5, 2, bias=False))
    return parts.to(memory_format=torch.channels_last).requires_grad_(False)


def noted(held: Any) -> TensorDigests:
    digests = TensorDigests()
    for name in NAMES:
        digests.note(name, reader_of(held, name))
    return digests


def flip_a_bit(tensor: Tensor) -> None:
    tensor.view(torch.int32).flatten()[-1] ^= 1


def put_a_tensor(held: Any) -> None:
    del held[0].weight
    held[0].weight = torch.ones(4, 6)


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda held: held[0].weight.mul_(2),
    "one bit": lambda held: flip_a_bit(held[0].weight),
    "two rows": lambda held: held[0].weight.copy_(held[0].weight[[1, 0, 2, 3]]),
    "its numbers lie elsewhere": lambda held: setattr(held[0].weight, "data", torch.ones(4, 6)),
    "another shape": lambda held: setattr(held[0].weight, "data", held[0].weight.data.view(6, 4)),
    "another order": lambda held: held[0].weight.as_strided_((4, 6), (1, 4)),
    "another parameter": lambda held: setattr(held[0], "weight", nn.Parameter(torch.ones(4, 6))),
    "a tensor in its place": put_a_tensor,
    "a tensor before it": lambda held: held[0].__dict__.update(weight=torch.ones(4, 6)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_named_and_nothing_else(change: str) -> None:
    held = module()
    digests = noted(held)
    assert digests.changed(NAMES) == []
    CHANGES[change](held)
    assert digests.changed(NAMES) == ["0.weight"]
    assert digests.changed(["2.weight", "0.weight"]) == ["0.weight"]
    assert digests.changed(["0.bias", "1.running_var"]) == []


@pytest.mark.parametrize("name", NAMES[1:])
def test_every_kind_of_tensor_of_a_module_is_known(name: str) -> None:
    held = module()
    digests = noted(held)
    owner, attribute = name.split(".")
    getattr(held.get_submodule(owner), attribute).flatten()[-1:].add_(1)
    channels = held[2].weight.permute(0, 2, 3, 1).flatten()
    if name == "2.weight":
        channels[-1:].add_(1)
    assert digests.changed(NAMES) == [name]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_numbers_elsewhere_are_the_same(dtype: torch.dtype) -> None:
    kept = [numbers(dtype, 3, 4)]
    digests = TensorDigests()
    digests.note("kept", lambda: kept[0])
    kept[0] = kept[0].clone()
    assert digests.changed(["kept"]) == []
    kept[0] = kept[0].T.contiguous().T
    assert digests.changed(["kept"]) == []
    kept[0][2, 3] += 1
    assert digests.changed(["kept"]) == ["kept"]


def test_numbers_that_lie_apart_are_read_beside_those_that_do_not() -> None:
    apart, together = numbers(torch.float32, 4, 6)[:, :3], numbers(torch.float32, 4)
    digests = TensorDigests()
    digests.note("apart", lambda: apart)
    digests.note("together", lambda: together)
    assert digests.changed(digests.names) == []
    apart[3, 2] += 1
    assert digests.changed(digests.names) == ["apart"]
    together[0] += 1
    assert digests.changed(digests.names) == ["apart", "together"]


def test_what_is_noted_again_is_right_as_it_is_then() -> None:
    digests = TensorDigests()
    digests.note("text", lambda: torch.zeros(3))
    digests.note("text", lambda: torch.ones(3))
    assert digests.changed(["text"]) == []
    assert len(digests) == 1
