"""The flash-attn package (Dao et al., 2022), imported only where it was chosen by name."""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.attention.key_bias import KeyBias
from scope_rt.attention.lse_merge import attend_by_runs


class Flash:
    """flash-attn takes no mask; it returns the LSE, and runs are merged by it.

    Raises:
        UserInputError: the package is not installed, or does not load.
    """

    name = "flash"

    def __init__(self) -> None:
        try:
            self._attend: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = import_module(
                "flash_attn"
            ).flash_attn_func
        except ImportError as error:
            raise UserInputError(
                f"the attention backend flash needs the flash-attn package ({error}); "
                "pip install 'scope-rt[flash-attn]', or choose lse_merge"
            ) from error

    def attend(
        self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, bias: KeyBias | None
    ) -> Tensor:
        if not q_BTHD.is_cuda or q_BTHD.dtype not in (torch.float16, torch.bfloat16):
            raise UserInputError(
                mismatch(
                    "attention_backend (SCOPE_KV_BIAS_BACKEND) flash",
                    got=f"{q_BTHD.dtype} on {q_BTHD.device.type}",
                    want="float16 or bfloat16 on cuda",
                    fix="choose lse_merge",
                )
            )
        return attend_by_runs(self._with_lse, q_BTHD, k_BKHD, v_BKHD, bias)

    def _with_lse(self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor) -> tuple[Tensor, Tensor]:
        out, lse_BHT, _ = self._attend(q_BTHD, k_BKHD, v_BKHD, return_attn_probs=True)
        return out, lse_BHT
