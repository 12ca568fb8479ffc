"""The runs say of every key what the definition says of its frame."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scope_rt.attention.key_bias import key_bias
from tests.attention.matrix import BLOCK, VIEWS, bias_of, view
from tests.tiny_models import CPU


@given(
    sink=st.integers(0, 4),
    window=st.integers(BLOCK, 9),
    start=st.integers(0, 40),
    tokens=st.integers(1, 5),
    bias=st.floats(1e-30, 1.0, exclude_max=True),
)
def test_runs_bias_the_past_and_nothing_else(
    sink: int, window: int, start: int, tokens: int, bias: float
) -> None:
    frames = view(sink=sink, window=window, start=start)
    got = key_bias(frames, num_current=BLOCK, frame_tokens=tokens, bias=bias)
    assert got is not None
    current = range(start, start + BLOCK)
    exempt = {min(frames), *current}
    want = [0.0 if frame in exempt else math.log(bias) for frame in frames for _ in range(tokens)]
    assert got.vector(CPU, torch.float64).tolist() == want
    assert got.num_tokens == len(want)
    neighbours = zip(got.runs, got.runs[1:], strict=False)
    assert all(a.log_bias != b.log_bias for a, b in neighbours)


def test_the_oldest_frame_and_the_current_chunk_are_exempt() -> None:
    bias = key_bias((6, 7, 2, 3, 4, 5), num_current=3, frame_tokens=4, bias=0.5)
    assert bias is not None
    assert [(run.num_tokens, run.log_bias) for run in bias.runs] == [
        (12, 0.0),
        (8, math.log(0.5)),
        (4, 0.0),
    ]


@pytest.mark.parametrize("frames", VIEWS.values(), ids=VIEWS.keys())
def test_a_bias_of_one_changes_nothing(frames: tuple[int, ...]) -> None:
    assert bias_of(frames, 1.0) is None


def test_weights_of_the_cache_add_to_the_bias_of_the_past() -> None:
    weights = (0.0, -2.0, -2.0, 0.0, 0.0, 0.0)
    bias = key_bias(
        (6, 0, 2, 3, 4, 5), num_current=3, frame_tokens=4, bias=0.5, log_weights=weights
    )
    assert bias is not None
    log_biases = [0.0, -2.0, math.log(0.5) - 2.0, math.log(0.5), 0.0]
    assert [(run.num_tokens, run.log_bias) for run in bias.runs] == list(
        zip((4, 4, 4, 4, 8), log_biases, strict=True)
    )
    alone = key_bias((4, 5), num_current=1, frame_tokens=4, bias=1.0, log_weights=(-2.0, 0.0))
    assert alone is not None
    assert [run.log_bias for run in alone.runs] == [-2.0, 0.0]
    assert key_bias((4, 5), num_current=1, frame_tokens=4, bias=1.0, log_weights=(0.0, 0.0)) is None
