"""Muon in float32: updates of matrices are made orthogonal before they are applied.

Method: Jordan et al., 2024, with the step scaled to the size AdamW would take (Liu et al., 2025).
torch's own Muon iterates in bfloat16, which a CPU without such units computes many times slower.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalised(x_NRC: Tensor, num_iterations: int = 5) -> Tensor:
    """The nearest orthogonal matrices to a stack `x_NRC`, by a quintic Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    x: Tensor = x_NRC.mT if tall else x_NRC
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix; equal shapes are iterated as one batch."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                by_shape[p.shape].append(p)
            for shape, matrices in by_shape.items():
                updates = orthogonalised(torch.stack([self._momentum(p, group) for p in matrices]))
                scale = 0.2 * max(shape) ** 0.5 * group["lr"]
                for p, update in zip(matrices, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=scale)

    def _momentum(self, p: Tensor, group: dict[str, float]) -> Tensor:
        """Nesterov momentum of `p`'s gradient."""
        assert p.grad is not None
        buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
        buffer.lerp_(p.grad, 1 - group["momentum"])
        return p.grad.lerp(buffer, group["momentum"])
