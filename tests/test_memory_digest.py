"""A digest of memory is of its kind and order; that every change counts, `test_bit_digest` says."""

import pytest
import torch

from scope_rt.bit_digest import bit_digest, block_digests
from scope_rt.memory_digest import frame_digests, memory_digest
from tests.test_bit_digest import DTYPES, numbers


def test_dtype_and_shape_count_and_the_layout_in_memory_does_not() -> None:
    whole = numbers(torch.float32, 6, 8)
    assert memory_digest(whole.view(8, 6)) != memory_digest(whole)
    assert memory_digest(whole.view(torch.int32)) != memory_digest(whole)
    assert memory_digest(whole.T.contiguous().T) == memory_digest(whole)
    assert memory_digest(torch.tensor(3.0)) != memory_digest(torch.tensor(4.0))
    assert memory_digest(torch.empty(0, 4)) != memory_digest(torch.empty(4, 0))
    weight = torch.nn.Parameter(whole.clone())
    assert memory_digest(weight) == memory_digest(whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_a_frame_has_its_digest_wherever_it_lies(dtype: torch.dtype, tokens: int) -> None:
    whole = numbers(dtype, 3, 2, 12, 4, 5)
    want = frame_digests(whole, tokens)
    assert want.shape == (3, 2, 12 // tokens)
    assert len(set(want.flatten().tolist())) == want.size
    assert (frame_digests(whole[1:, :, tokens:], tokens) == want[1:, :, 1:]).all()
    assert (frame_digests(whole[2, 1:, :tokens], tokens) == want[2, 1:, :1]).all()
    strided = whole.transpose(2, 3).contiguous().transpose(2, 3)
    assert (frame_digests(strided, tokens) == want).all()
    wide = torch.cat((whole, whole), dim=-1)[..., :5]
    assert (frame_digests(wide, tokens) == want).all()
    narrow = whole[..., :1]
    assert (frame_digests(narrow, tokens) == frame_digests(narrow.contiguous(), tokens)).all()


def test_blocks_that_are_summed_have_the_digests_of_tensors() -> None:
    whole = numbers(torch.float32, 3, 2, 4, 5)
    found = block_digests(whole)
    assert found.tolist() == [[bit_digest(block) for block in layer] for layer in whole]
