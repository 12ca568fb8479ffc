"""UMT5's encoder as Wan uses it: rows after the prompt's own are zero, and are attended.

A prompt is encoded by itself and without padding: a masked token adds exactly nothing to any other,
so these are the numbers of the whole 512, and equal prompts have equal bits in any company.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scope_rt.part_place import PartPlace
from scope_rt.text.prompt_ids import TEXT_LEN, PromptIds


class Umt5TextEncoder:
    """Loaded by `scope_rt.text.loading`; on a device and in a dtype of its own."""

    text_len = TEXT_LEN

    def __init__(
        self, model: nn.Module, ids: PromptIds, *, text_dim: int, place: PartPlace
    ) -> None:
        """`model` is transformers' `UMT5EncoderModel`, which lies where `place` says."""
        self.model: Any = model
        self.ids, self.text_dim, self._place = ids, text_dim, place

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings `[B, 512, text_dim]`, float32 on the CPU; blocks until they are there.

        A prompt of more than 512 tokens is cut, with one warning.
        """
        embedded = torch.zeros(len(prompts), self.text_len, self.text_dim)
        with self._on_device() as device:
            for rows, prompt in zip(embedded, prompts, strict=True):
                ids = torch.tensor([self.ids(prompt)], device=device)
                encoded: Tensor = self.model(input_ids=ids).last_hidden_state
                rows[: ids.shape[1]] = encoded[0].float().cpu()
        return embedded

    @contextmanager
    def _on_device(self) -> Iterator[torch.device]:
        """Where the weights lie inside; one that is offloaded takes them there and back."""
        if self._place.offload:
            self.model.to(self._place.device)
        try:
            yield self._place.device
        finally:
            if self._place.offload:
                self.model.to("cpu")
