"""The bytes of a tensor are those of its values in C order, and no copy of them is made."""

import numpy as np
import pytest
import torch
from torch import Tensor

from scope_rt.tensors import bytes_of, of_bytes


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.zeros(0, 3),
        torch.zeros(1, dtype=torch.int64).expand(4)[:0],  # of stride 0
        torch.arange(6.0).reshape(2, 3).T,
        torch.arange(4)[1:],
    ],
)
def test_bytes_are_those_of_the_values_in_c_order(tensor: Tensor) -> None:
    assert bytes_of(tensor) == np.ascontiguousarray(tensor.numpy()).tobytes()


def test_any_dtype_has_bytes_and_a_gradient_does_not_matter() -> None:
    weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert bytes(bytes_of(weight)) == b"\x80\x3f\x80\x3f"


def test_bytes_are_the_tensors_own() -> None:
    tensor = torch.zeros(2, dtype=torch.uint8)
    seen = bytes_of(tensor)
    tensor[1] = 7
    assert bytes(seen) == b"\x00\x07"


@pytest.mark.parametrize("data", [b"", b"\x00\xff"])
def test_bytes_become_a_tensor_of_their_own_and_are_its_bytes_again(data: bytes) -> None:
    made, before = of_bytes(data), bytearray(data)
    assert (made.dtype, made.shape) == (torch.uint8, (len(data),))
    assert bytes(bytes_of(made)) == data
    made.zero_()
    assert data == before
