"""Which backend runs is a contract between ranks: it is named, never guessed.

The name decides the kernel family, together with device and dtype; the bias never does. A backend
runs the same family at a bias of 1.0 as at any other.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.attention.flash import Flash
from scope_rt.attention.flex import Flex
from scope_rt.attention.key_bias import KeyBias
from scope_rt.attention.lse_merge import LseMerge
from scope_rt.attention.reference import DenseReference
from scope_rt.attention.sdpa import Sdpa


class AttentionBackend(Protocol):
    """`softmax(q k / sqrt(D) + log_bias) v`."""

    @property
    def name(self) -> str: ...

    def attend(
        self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, bias: KeyBias | None
    ) -> Tensor:
        """Attend to all K keys, `[B, T, H, D]` in the dtype of `q_BTHD`.

        `bias` covers the K keys and is added to every query's scores; None adds nothing.

        Raises:
            UserInputError: this backend has no kernel for this device or dtype.
        """
        ...


BACKENDS: Mapping[str, Callable[[], AttentionBackend]] = MappingProxyType(
    {
        Sdpa.name: Sdpa,
        LseMerge.name: LseMerge,
        Flash.name: Flash,
        Flex.name: Flex,
        DenseReference.name: DenseReference,
    }
)


def backend_named(name: str) -> AttentionBackend:
    """The backend called `name`.

    Raises:
        UserInputError: there is none of that name, or its package is missing.
    """
    if name not in BACKENDS:
        raise UserInputError(
            f"attention_backend (SCOPE_KV_BIAS_BACKEND) is {name!r}; "
            f"choose one of {', '.join(BACKENDS)}"
        )
    return BACKENDS[name]()


def default_backend(device: torch.device, dtype: torch.dtype) -> str:
    """The name to run where nobody chose one; put it in the parity keys, for ranks may differ."""
    if device.type != "cuda":
        return Sdpa.name
    fits_flash = dtype in (torch.float16, torch.bfloat16) and find_spec("flash_attn") is not None
    return Flash.name if fits_flash else LseMerge.name
