"""A digest of memory is of its kind and order; that every change counts, `test_bit_digest` says."""

import torch

from scope_rt.memory_digest import memory_digest
from tests.test_bit_digest import numbers


def test_dtype_and_shape_count_and_the_layout_in_memory_does_not() -> None:
    whole = numbers(torch.float32, 6, 8)
    assert memory_digest(whole.view(8, 6)) != memory_digest(whole)
    assert memory_digest(whole.view(torch.int32)) != memory_digest(whole)
    assert memory_digest(whole.T.contiguous().T) == memory_digest(whole)
    assert memory_digest(torch.tensor(3.0)) != memory_digest(torch.tensor(4.0))
    assert memory_digest(torch.empty(0, 4)) != memory_digest(torch.empty(4, 0))
    weight = torch.nn.Parameter(whole.clone())
    assert memory_digest(weight) == memory_digest(whole)
