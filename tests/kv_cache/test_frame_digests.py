"""A frame is known again wherever it lies, on the CPU and as another device does it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scope_rt.bit_digest import bit_digest, block_digests
from scope_rt.kv_cache import frame_digests
from scope_rt.kv_cache.frame_digests import FrameDigests
from tests.test_bit_digest import DTYPES, numbers

LAYERS, FRAMES = range(3), range(6)
EVERYWHERE = pytest.mark.parametrize("made", [frame_digests._OnHost, frame_digests._OnDevice])


def noted(made: Callable[[Tensor, int], FrameDigests], part: Tensor) -> FrameDigests:
    digests = made(torch.zeros_like(part), 2)
    for layer in LAYERS:
        for first in (0, 3):
            given = part[layer, :, 2 * first : 2 * first + 6]
            digests.note([(layer, range(first, first + 3), given)])
    return digests


@EVERYWHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_frames_are_known_at_their_place_and_at_no_other(
    made: Callable[[Tensor, int], FrameDigests], dtype: torch.dtype
) -> None:
    part = numbers(dtype, 3, 2, 12, 4, 5)
    digests = noted(made, part)
    assert digests.differing(part, LAYERS, FRAMES, slice(0, 12)) == []
    assert digests.differing(part, range(1, 3), range(2, 5), slice(4, 10)) == []
    assert digests.differing(part, LAYERS, range(1, 2), slice(4, 6)) == [(0, 1), (1, 1), (2, 1)]
    part[1, 1, 5, 3, 4] += 1
    assert digests.differing(part, LAYERS, FRAMES, slice(0, 12)) == [(1, 2)]


@EVERYWHERE
def test_pages_that_lie_apart_are_gathered(
    made: Callable[[Tensor, int], FrameDigests],
) -> None:
    part = numbers(torch.float32, 3, 2, 12, 4, 5)
    digests = noted(made, part)
    place = torch.tensor([6, 7, 0, 1, 2, 3])
    elsewhere = torch.empty_like(part)
    elsewhere[:, :, place] = part[:, :, :6]
    assert digests.differing(elsewhere, LAYERS, range(3), place) == []
    elsewhere[2, 0, 7] = 0
    assert digests.differing(elsewhere, LAYERS, range(3), place) == [(2, 0)]


def test_only_layers_that_are_looked_at_are_gathered() -> None:
    one = numbers(torch.float32, 1, 2, 12, 4, 5)
    part = one.expand(10**9, -1, -1, -1, -1)  # no memory could hold a copy
    digests = frame_digests._OnHost(part, 2)
    digests.note([(0, FRAMES, one[0])])
    assert digests.differing(part, range(1), FRAMES, torch.arange(12)) == []


@EVERYWHERE
@pytest.mark.parametrize("width", [1, 5])
def test_numbers_that_lie_apart_are_read_in_their_order(
    made: Callable[[Tensor, int], FrameDigests], width: int
) -> None:
    part = numbers(torch.float32, 3, 2, 12, 4, 6)[..., :width]
    for strided in (part, part.transpose(2, 3).contiguous().transpose(2, 3)):
        digests = noted(made, strided)
        assert digests.differing(part.contiguous(), LAYERS, FRAMES, slice(0, 12)) == []
        assert digests.differing(strided, LAYERS, FRAMES, slice(0, 12)) == []


def test_a_part_of_another_kind_is_not_read_on_the_cpu() -> None:
    part = numbers(torch.float32, 3, 2, 12, 4, 5)
    digests = noted(frame_digests._OnHost, part)
    every = [(layer, frame) for layer in LAYERS for frame in FRAMES]
    for other in (part[:1], part.half(), part.view(torch.int32)):
        assert digests.differing(other, LAYERS, FRAMES, slice(0, 12)) == every


def test_blocks_have_the_digests_of_tensors() -> None:
    whole = numbers(torch.float32, 3, 2, 4, 5)
    assert block_digests(whole).tolist() == [[bit_digest(block) for block in of] for of in whole]
