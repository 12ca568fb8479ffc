"""Teacher forcing computes what a stream computes, chunk by chunk."""

import pytest
import torch

from scope_lab.tiny.teacher_forcing import TeacherForcing
from scope_rt.attention.reference import DenseReference
from tests.rounding import attention_bound

pytestmark = pytest.mark.numeric

CHUNKS, TOKENS, WINDOW = 5, 6, 3


def test_each_chunk_sees_the_clean_window_and_itself() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, (2 * CHUNKS - 1) * TOKENS, 2, 8, dtype=torch.float64)
    out = TeacherForcing(CHUNKS, TOKENS, WINDOW)(0, q, k, v)
    for row in range(2 * CHUNKS - 1):
        noisy = row >= CHUNKS - 1
        index = row - (CHUNKS - 1) if noisy else row
        visible = [c for c in range(CHUNKS - 1) if index - WINDOW < c < index] + [row]
        keys = torch.cat([torch.arange(c * TOKENS, (c + 1) * TOKENS) for c in visible])
        own = slice(row * TOKENS, (row + 1) * TOKENS)
        seen = q[:, own], k[:, keys], v[:, keys]
        off = (out[:, own] - DenseReference().attend(*seen, None)).abs()
        assert (off <= attention_bound(*seen)).all()
