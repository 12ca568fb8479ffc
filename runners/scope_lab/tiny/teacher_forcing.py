"""Training sees exactly what a stream sees: clean past chunks inside the window, and its own chunk.

A sequence is `[clean frames | noisy frames]` of the same clip (teacher forcing over block-causal
masks, as in CausVid and Self-Forcing). Instead of a mask, every chunk attends to the slice of keys
it may see, so no masked score is ever computed. Nothing sees the last chunk's clean copy, so it is
left out.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TeacherForcing:
    """Self-attention over all but the last of `num_chunks` clean chunks, then all of them noisy."""

    num_chunks: int
    chunk_tokens: int
    window_chunks: int

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        q, k, v = (
            x.unflatten(1, (-1, self.chunk_tokens)).transpose(2, 3)
            for x in (q_BTHD, k_BTHD, v_BTHD)
        )  # [B, chunk, H, t, D]
        num_clean = self.num_chunks - 1
        clean = [self._attend(q[:, i], k, v, past=i, own=i) for i in range(num_clean)]
        noisy = [
            self._attend(q[:, num_clean + i], k, v, past=i, own=num_clean + i)
            for i in range(self.num_chunks)
        ]
        return torch.stack([*clean, *noisy], dim=1).transpose(2, 3).flatten(1, 2)

    def _attend(self, q_BHTD: Tensor, k: Tensor, v: Tensor, *, past: int, own: int) -> Tensor:
        """Attend to the clean chunks before `past` that the window holds, and to chunk `own`."""
        visible = [*range(max(0, past + 1 - self.window_chunks), past), own]
        k_BHKD, v_BHKD = (x[:, visible].transpose(1, 2).flatten(2, 3) for x in (k, v))
        return F.scaled_dot_product_attention(q_BHTD, k_BHKD, v_BHKD)
