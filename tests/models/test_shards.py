"""A TP degree that cannot split a model is refused with the reason and the degrees that can."""

from dataclasses import replace

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.models.shards import check_degree
from tests.tiny_folder import CONFIG

SIX_HEADS = replace(CONFIG, num_attention_heads=6, ffn_dim=320)


def test_a_degree_that_divides_the_heads_alone_is_refused_for_the_channels() -> None:
    with pytest.raises(UserInputError) as refused:
        check_degree(SIX_HEADS, 3)
    assert str(refused.value) == (
        "tp 3 does not divide the model's 6 heads and 320 feed-forward channels; choose one of 1, 2"
    )


def test_a_degree_that_divides_both_is_taken() -> None:
    check_degree(SIX_HEADS, 2)
