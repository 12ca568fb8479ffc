"""A transition leaves at once, arrives exactly, and brings the bias back to rest."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from scope_contracts.errors import PreflightError, UserInputError
from scope_rt.control.transition import (
    MIN_SINE,
    Interpolation,
    Transition,
    TransitionSpec,
    TransitionStep,
    bias_at,
    interpolate,
)
from tests.rounding import gamma

METHODS = st.sampled_from(Interpolation)
BIASES = st.floats(min_value=1e-6, max_value=1.0)
CHUNKS = st.integers(min_value=1, max_value=40)
WEIGHTS = st.floats(min_value=0.0, max_value=1.0)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def vector_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two `[1, 3, dim]` of every size float32 has, some parallel, opposite or zero."""
    dim = draw(st.integers(min_value=1, max_value=6))
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = st.lists(numbers, min_size=3 * dim, max_size=3 * dim)
    source = torch.tensor(draw(values), dtype=torch.float32).reshape(1, 3, dim)
    factor = draw(st.sampled_from([None, 0.0, 1.0, 0.5, -1.0, -0.25, 1.0 + 1e-6]))
    if factor is not None:
        limit = torch.finfo(torch.float32).max
        return source, (source * factor).clamp(-limit, limit)
    return source, torch.tensor(draw(values), dtype=torch.float32).reshape(1, 3, dim)


def spec(
    num_chunks: int = 4, method: Interpolation = Interpolation.SLERP, bias_floor: float = 0.25
) -> TransitionSpec:
    return TransitionSpec(num_chunks=num_chunks, method=method, bias_floor=bias_floor)


def random_embeds(seed: int) -> Tensor:
    return torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(seed))


def walk(transition: Transition, resting_bias: float = 1.0) -> list[TransitionStep]:
    steps = [transition.next(resting_bias=resting_bias)]
    while steps[-1].following is not None:
        steps.append(steps[-1].following.next(resting_bias=resting_bias))
    return steps


@given(pair=vector_pairs(), dtype=DTYPES, method=METHODS, num_chunks=CHUNKS, rest=BIASES)
def test_it_takes_its_chunks_and_arrives_with_exact_bits(
    pair: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    method: Interpolation,
    num_chunks: int,
    rest: float,
) -> None:
    limit = torch.finfo(dtype).max
    source, target = (each.clamp(-limit, limit).to(dtype) for each in pair)
    transition = Transition(source=source, target=target, spec=spec(num_chunks, method))
    steps = walk(transition, rest)
    assert len(steps) == num_chunks
    assert torch.equal(steps[-1].embeds, target)
    assert steps[-1].kv_cache_attention_bias == rest
    for step in steps:
        assert step.embeds.isfinite().all()
        assert (step.embeds.shape, step.embeds.dtype) == (target.shape, dtype)


@pytest.mark.parametrize("method", Interpolation)
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8])
def test_the_first_chunk_is_off_the_source_and_each_chunk_is_nearer(
    method: Interpolation, num_chunks: int
) -> None:
    source, target = random_embeds(1), random_embeds(2)
    steps = walk(Transition(source=source, target=target, spec=spec(num_chunks, method)))
    gone = [float((step.embeds - source).norm()) for step in steps]
    left = [float((step.embeds - target).norm()) for step in steps]
    assert all(near < far for near, far in pairwise([0.0, *gone]))
    assert all(near < far for far, near in pairwise(left))
    if method is Interpolation.LERP:
        want = float((target - source).norm()) / num_chunks
        rounding = gamma(source.numel() + 2, torch.float32) * float(source.norm() + target.norm())
        assert gone[0] == pytest.approx(want, rel=0, abs=rounding)


@given(pair=vector_pairs(), weight=WEIGHTS)
def test_slerp_keeps_norms_between_both_norms(pair: tuple[Tensor, Tensor], weight: float) -> None:
    source, target = (each.double() for each in pair)
    mixed = interpolate(source, target, weight, Interpolation.SLERP)
    assert mixed.isfinite().all()
    norms = torch.stack([source.norm(dim=-1), target.norm(dim=-1)])
    cosine = (source * target).sum(-1) / norms.prod(0).clamp_min(torch.finfo(torch.float64).tiny)
    opposite = cosine < -0.999999
    # A straight line between directions less than MIN_SINE apart is shorter by their square, and
    # dividing by such a sine enlarges what its numerator was rounded by.
    slack = (MIN_SINE**2 + gamma(32, torch.float64) / MIN_SINE) * norms.amax(0)
    assert (mixed.norm(dim=-1) <= norms.amax(0) + slack).all()
    assert ((mixed.norm(dim=-1) >= norms.amin(0) - slack) | opposite).all()


def test_slerp_turns_evenly_and_scales_evenly() -> None:
    source, target = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 6.0]])
    for weight in (0.25, 0.5, 0.75):
        mixed = interpolate(source, target, weight, Interpolation.SLERP)
        rounding = gamma(4, torch.float32)
        assert float(mixed.norm()) == pytest.approx(2 + 4 * weight, rel=rounding)
        angle = math.atan2(mixed[0, 1], mixed[0, 0])
        assert angle == pytest.approx(weight * math.pi / 2, rel=0, abs=rounding)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([1.0, 0.0], [3.0, 0.0]),
        ([1.0, 0.0], [3.0, 3 * MIN_SINE / 10]),
        ([1.0, 0.0], [-3.0, 0.0]),
        ([0.0, 0.0], [1.0, 2.0]),
        ([1.0, 2.0], [0.0, 0.0]),
        ([0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_slerp_is_a_straight_line_where_there_is_no_great_circle(
    source: list[float], target: list[float]
) -> None:
    a, b = torch.tensor([source]), torch.tensor([target])
    mixed = interpolate(a, b, 0.25, Interpolation.SLERP)
    torch.testing.assert_close(mixed, interpolate(a, b, 0.25, Interpolation.LERP), rtol=0, atol=0)


def test_each_token_has_its_own_great_circle() -> None:
    source = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    target = torch.tensor([[0.0, 1.0], [0.0, 4.0], [-1.0, 0.0]])
    mixed = interpolate(source, target, 0.5, Interpolation.SLERP)
    half = math.sqrt(0.5)
    want = torch.tensor([[half, half], [0.0, 2.0], [0.0, 0.0]])
    assert (mixed - want).abs().max() <= gamma(4, torch.float32)


def test_a_turned_vector_too_long_for_its_dtype_stays_finite() -> None:
    source, target = torch.tensor([[60000.0, 60000.0]]), torch.tensor([[60000.0, -60000.0]])
    mixed = interpolate(source.half(), target.half(), 0.5, Interpolation.SLERP)
    assert mixed[0, 0] == torch.finfo(torch.float16).max


@given(num_chunks=CHUNKS, rest=BIASES, floor=BIASES)
def test_the_bias_stays_between_rest_and_floor_and_is_symmetric(
    num_chunks: int, rest: float, floor: float
) -> None:
    shape = spec(num_chunks, bias_floor=floor)
    biases = [bias_at(step, shape, rest) for step in range(1, num_chunks)]
    assert all(min(rest, floor) <= bias <= max(rest, floor) for bias in biases)
    assert biases == biases[::-1]


@pytest.mark.parametrize(("rest", "floor"), [(1.0, 0.1), (0.3, 0.9)])
def test_the_bias_leaves_rest_at_once_and_meets_its_floor_in_the_middle(
    rest: float, floor: float
) -> None:
    source, target = random_embeds(1), random_embeds(2)
    transition = Transition(source=source, target=target, spec=spec(8, bias_floor=floor))
    biases = [step.kv_cache_attention_bias for step in walk(transition, rest)]
    assert biases[3] == pytest.approx(floor)
    assert biases[0] != rest
    assert biases[-1] == rest
    away = [abs(math.log(bias / rest)) for bias in biases]
    assert away[:4] == sorted(away[:4])
    assert biases[1] == pytest.approx(math.sqrt(rest * floor)), "halfway in log space"


def test_a_floor_at_rest_leaves_the_bias_alone() -> None:
    shape = spec(7, bias_floor=0.3)
    assert {bias_at(step, shape, 0.3) for step in range(1, 7)} == {0.3}


def test_one_chunk_is_a_change_at_once() -> None:
    target = random_embeds(2)
    (only,) = walk(Transition(source=random_embeds(1), target=target, spec=spec(1)), 0.7)
    assert torch.equal(only.embeds, target)
    assert only.kv_cache_attention_bias == 0.7


def test_it_resumes_anywhere_with_equal_bits() -> None:
    source, target = random_embeds(1), random_embeds(2)
    whole = walk(Transition(source=source, target=target, spec=spec(6)), 0.9)
    for planned in range(6):
        resumed = Transition(source=source, target=target, spec=spec(6), step=planned)
        for again, before in zip(walk(resumed, 0.9), whole[planned:], strict=True):
            assert torch.equal(again.embeds, before.embeds)
            assert again.kv_cache_attention_bias == before.kv_cache_attention_bias


def test_it_can_start_from_the_middle_of_another() -> None:
    first = Transition(source=random_embeds(1), target=random_embeds(2), spec=spec(4))
    midway = first.next(resting_bias=1.0).embeds
    steps = walk(Transition(source=midway, target=random_embeds(3), spec=spec(4)))
    assert 0 < (steps[0].embeds - midway).norm() < (random_embeds(3) - midway).norm()
    assert torch.equal(steps[-1].embeds, random_embeds(3))


@pytest.mark.parametrize("num_chunks", [0, -3])
def test_no_chunks_are_refused_by_name(num_chunks: int) -> None:
    with pytest.raises(UserInputError, match=r"num_chunks.*1 or more"):
        spec(num_chunks)


@pytest.mark.parametrize("bias_floor", [0.0, -0.1, 1.01, math.nan, math.inf])
def test_a_floor_out_of_range_is_refused_by_name(bias_floor: float) -> None:
    with pytest.raises(UserInputError, match=r"bias_floor.*0 < bias <= 1"):
        spec(bias_floor=bias_floor)


def test_embeddings_that_do_not_fit_each_other_are_refused() -> None:
    source = torch.zeros(1, 5, 16)
    for target in (torch.zeros(1, 1, 16), torch.zeros(1, 5, 16, dtype=torch.bfloat16)):
        with pytest.raises(PreflightError, match="transition target"):
            Transition(source=source, target=target, spec=spec())


@pytest.mark.parametrize("step", [-1, 4, 5])
def test_a_transition_that_is_over_is_refused(step: int) -> None:
    with pytest.raises(PreflightError, match="transition step"):
        Transition(source=random_embeds(1), target=random_embeds(2), spec=spec(4), step=step)
