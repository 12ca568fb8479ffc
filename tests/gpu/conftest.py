"""What holds on a GPU holds on the CPU: each test runs there too, and is known to fit the code."""

import pytest
import torch

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU where there is one, and the CPU in its place."""
    return torch.device(request.param)
