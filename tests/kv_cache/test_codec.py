"""What a codec loses is bounded by the scale it stored, and counted bytes are real bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scope_contracts.errors import UnsupportedError, UserInputError
from scope_contracts.row_format import INT4_GROUP, CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.kv_cache.codec import CODECS, LEAST_SCALE, codec_for
from scope_rt.kv_cache.row_store import RowStore
from tests.rounding import gamma, unit_roundoff

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
LOSSY = [kind for kind in CodecKind if kind is not CodecKind.IDENTITY]
rows = st.builds(
    lambda seed, size, offset: (
        torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(seed)) * 10.0**size + offset
    ),
    st.integers(0, 2**31),
    st.floats(-7, 3.5),
    st.sampled_from([0.0, 3.0, -1e4]),
)


def through(kind: CodecKind, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    codec = CODECS[kind]()
    parts = codec.encode(x)
    assert [(p.dtype, p.shape[-1]) for p in parts] == [
        (p.dtype, p.width) for p in codec.parts(x.shape[-1], x.dtype)
    ]
    return codec.decode(parts, x.dtype), parts


def largest_loss(kind: CodecKind, x: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    """The bound of every number, from the scale that was stored with it."""
    scale = parts[1].to(x.dtype)
    if kind is CodecKind.FP8:
        return torch.maximum(x.abs() / 16, scale / 1024)
    return scale.repeat_interleave(x.shape[-1] // scale.shape[-1], -1) / 2


def rounding(x: Tensor) -> Tensor:
    """Minus the minimum, by the scale and back, of numbers up to twice the largest; then stored."""
    work = torch.promote_types(x.dtype, torch.float32)
    return x.double().abs().amax() * (2 * gamma(4, work) + unit_roundoff(x.dtype))


@pytest.mark.parametrize("kind", LOSSY)
@settings(max_examples=20, deadline=None)
@given(x=rows)
def test_a_number_is_off_by_no_more_than_its_stored_scale_says(kind: CodecKind, x: Tensor) -> None:
    x = x.double()
    back, parts = through(kind, x)
    assert ((back - x).abs() <= largest_loss(kind, x, parts) + rounding(x)).all()


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_come_back_in_their_dtype_within_the_bound(
    kind: CodecKind, dtype: torch.dtype
) -> None:
    x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    back, parts = through(kind, x)
    assert back.dtype is dtype
    loss = largest_loss(kind, x.double(), parts)
    assert ((back.double() - x.double()).abs() <= loss + rounding(x)).all()


@pytest.mark.parametrize("kind", list(CodecKind))
def test_zeros_come_back_as_zeros(kind: CodecKind) -> None:
    back, parts = through(kind, torch.zeros(2, 3, 32))
    assert not back.any()
    assert kind is CodecKind.IDENTITY or (parts[1] == LEAST_SCALE).all()


@pytest.mark.parametrize("kind", LOSSY)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf, 1e12])
def test_what_cannot_be_stored_shows_and_spoils_only_its_own_scale(
    kind: CodecKind, broken: float
) -> None:
    x = torch.ones(2, 2, 32)
    x[0, 1, 3] = broken
    back, _ = through(kind, x)
    spoiled = torch.zeros(2, 2, 32, dtype=torch.bool)
    spoiled[0, 1, : INT4_GROUP if kind is CodecKind.INT4 else 32] = True
    assert torch.equal(back.isnan(), spoiled)


@pytest.mark.parametrize("number", [7e4, -7e4])
def test_a_minimum_that_float16_cannot_hold_shows_too(number: float) -> None:
    back, _ = through(CodecKind.INT4, torch.full((1, 1, 16), number))
    assert back.isnan().all()


@pytest.mark.parametrize("kind", list(CodecKind))
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_counted_bytes_are_those_of_the_tensors(kind: CodecKind, dtype: DType) -> None:
    row_format = RowFormat.full(heads=4, head_dim=48, dtype=dtype, value_dim=32, codec=kind)
    store = RowStore(row_format, num_layers=2, batch=3, num_slots=5, device=CPU)
    assert store.num_bytes == 2 * 3 * 5 * row_format.bytes_per_row
    halves = [row_format.shard(2), row_format.shard(4)]
    assert [half.bytes_per_row for half in halves] == [
        row_format.bytes_per_row // 2,
        row_format.bytes_per_row // 4,
    ]


def test_int4_refuses_heads_that_its_groups_do_not_divide() -> None:
    with pytest.raises(UserInputError, match=r"keys dim: got 40, want a multiple of 16; use int8"):
        RowFormat.full(heads=2, head_dim=40, dtype=DType.FLOAT32, codec=CodecKind.INT4)


def test_fp8_refuses_a_device_without_it_and_names_another_codec() -> None:
    with pytest.raises(UnsupportedError, match=r"float8_e4m3fn.*mps; use int8"):
        codec_for(CodecKind.FP8, torch.device("mps"))
