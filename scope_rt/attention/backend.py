"""Which backend runs is a contract between ranks: it is named, never guessed.

A bias of 1.0 stays on the same backend as any other. On the CPU, SDPA's one kernel takes the bias
as a mask; on GPUs, where a mask may choose another kernel, the LSE merge is to come.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.attention.reference import DenseReference
from scope_rt.attention.sdpa import Sdpa


class AttentionBackend(Protocol):
    """`softmax(q k / sqrt(D) + log_bias) v` for `[B, T, H, D]` tensors."""

    @property
    def name(self) -> str: ...

    def attend(
        self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, log_bias_K: Tensor | None
    ) -> Tensor:
        """Attend to all K keys; `log_bias_K` is added to every query's scores."""
        ...


BACKENDS: dict[str, type[Sdpa] | type[DenseReference]] = {
    backend.name: backend for backend in (Sdpa, DenseReference)
}


def backend_named(name: str) -> AttentionBackend:
    """The backend called `name`.

    Raises:
        UserInputError: there is none of that name.
    """
    if name not in BACKENDS:
        raise UserInputError(
            f"SCOPE_KV_BIAS_BACKEND is {name!r}; choose one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]()


def key_log_bias(
    frames_in_view: Sequence[int],
    *,
    num_current: int,
    frame_tokens: int,
    bias: float,
    device: torch.device,
) -> Tensor | None:
    """`log(bias)` for the keys of past chunks, 0 for the oldest frame in view and this chunk's.

    `frames_in_view` names the latent frame of every frame slot, in slot order; `num_current`
    counts this chunk's frames. Returns one value a key, fp32, or None when nothing changes.
    """
    if bias == 1.0:
        return None
    first_current = max(frames_in_view) + 1 - num_current
    oldest = min(frames_in_view)
    past = [oldest < frame < first_current for frame in frames_in_view]
    value = torch.log(torch.tensor(bias, dtype=torch.float64)).float()
    return (torch.tensor(past) * value).repeat_interleave(frame_tokens).to(device)
