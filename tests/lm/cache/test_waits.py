"""The counter of device waits sees every way in which a value comes to the host, once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.lm.cache.waits import Waits

READS: dict[str, Callable[[Tensor], object]] = {
    "tolist": Tensor.tolist,
    "item": lambda x: x[0].item(),
    "cpu": Tensor.cpu,
    "numpy": Tensor.numpy,
    "__bool__": lambda x: bool((x > 0).all()),
    "__int__": lambda x: int(x[0]),
    "__float__": lambda x: float(x[0]),
    "__index__": lambda x: range(x[0]),
    "nonzero": Tensor.nonzero,
    "_unique2": torch.unique,
    "masked_select": lambda x: x.masked_select(x > 1),
    "equal": lambda x: torch.equal(x, x),
    "index": lambda x: x[x > 1],
    "index_put_": lambda x: x.index_put_((x > 1,), torch.tensor([5, 5])),
}


@pytest.mark.parametrize("name", READS)
def test_a_value_that_the_host_needs_is_one_wait(name: str) -> None:
    numbers = torch.tensor([1, 2, 3])
    with Waits() as waits:
        READS[name](numbers)
    assert waits.names == [name]


def test_what_stays_on_the_device_is_no_wait() -> None:
    numbers, rows = torch.tensor([1, 2, 3]), torch.tensor([2, 0])
    with Waits() as waits:
        numbers[rows] = numbers[rows].clone()
        torch.where(numbers > 1, numbers, 0).cumsum(0).sort()
        assert numbers.shape[0] == len(numbers) == 3
    assert waits.names == []
    assert numbers.tolist() == [1, 2, 3]
    assert waits.names == [], "nothing is counted behind it"
