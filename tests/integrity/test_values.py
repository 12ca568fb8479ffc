"""A chunk of numbers that no model computes is never shown."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scope_contracts.envelope import LATENTS_OUT
from scope_contracts.errors import IntegrityError
from scope_rt.control.chunk import Chunk
from scope_rt.faults import FaultPoint
from scope_rt.values import check_latents, is_constant
from tests.integrity.corruption import Change, stream

AT = 2
CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "zero": (torch.zeros_like, "all latents are 0"),
    "NaN": (lambda latents: latents * torch.nan, "3072 of 3072 latents are not finite"),
    "some infinite": (
        lambda latents: (
            latents.flatten().index_fill(0, torch.tensor(7), torch.inf).view_as(latents)
        ),
        r"\d+ of 3072 latents are not finite",
    ),
    "beyond the recipe": (lambda latents: latents * 100, "beyond the recipe's latent_limit 30"),
}


def changed_result(change: Callable[[Tensor], Tensor]) -> Change:
    def apply(answer: tuple[object, dict[str, Tensor]]) -> object:
        result, tensors = answer
        return result, tensors | {LATENTS_OUT: change(tensors[LATENTS_OUT])}

    return Change(FaultPoint.RESULT, AT, apply)


@pytest.mark.parametrize("name", CHANGES)
def test_latents_that_no_model_computes_are_not_shown(name: str) -> None:
    change, said = CHANGES[name]
    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match=f"chunk {AT}: .*{said}|chunk {AT}: {said}"):
        stream(changed_result(change), num_chunks=AT + 2, shown=shown, model="tiny")
    assert len(shown) == AT


def test_without_the_check_they_are_shown() -> None:
    shown: list[Chunk] = []
    stream(changed_result(torch.zeros_like), num_chunks=AT + 2, shown=shown, integrity="off")
    assert len(shown) == AT + 2


def test_the_same_latents_again_are_refused() -> None:
    latents = torch.randn(1, 3, 4, 2, 2)
    check_latents(5, latents, repeats=False, limit=None)
    with pytest.raises(IntegrityError, match="chunk 5: the latents are those of the chunk before"):
        check_latents(5, latents, repeats=True, limit=None)


def test_a_recipe_that_states_no_limit_refuses_no_finite_number() -> None:
    check_latents(0, torch.tensor([1e30, -1e30]), repeats=False, limit=None)


@pytest.mark.parametrize("place", [0, 40_000, -1])
def test_a_picture_with_one_other_number_is_not_constant(place: int) -> None:
    frames = torch.full((1, 4, 64, 64, 3), 7, dtype=torch.uint8)
    assert is_constant(frames)
    frames.view(-1)[place] = 8
    assert not is_constant(frames)
