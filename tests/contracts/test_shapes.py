"""Sizes follow from the specs alone."""

from dataclasses import replace
from typing import Any

import pytest

from scope_contracts import (
    CacheChoice,
    CacheError,
    CacheIndices,
    CacheKind,
    ChunkGeometry,
    DType,
    FieldError,
    KVCacheSpec,
    TensorSpec,
    UserInputError,
)
from scope_contracts.row_format import CodecKind

CACHE: dict[str, Any] = {
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "frame_tokens": 10,
    "sink_frames": 1,
    "window_frames": 5,
    "batch": 3,
    "dtype": DType.FLOAT16,
}


def test_a_tensor_knows_its_bytes() -> None:
    assert TensorSpec("x", DType.BFLOAT16, (2, 3, 4)).num_bytes == 48
    assert TensorSpec("x", DType.INT64, ()).num_bytes == 8


def test_a_dtype_may_be_given_by_name_and_only_by_a_known_one() -> None:
    assert TensorSpec("x", "float32", ()).dtype is DType.FLOAT32  # type: ignore[arg-type]
    with pytest.raises(FieldError, match=r"x\.dtype: got 'float8'"):
        TensorSpec("x", "float8", ())  # type: ignore[arg-type]


def test_every_dtype_has_a_size() -> None:
    assert {dtype: dtype.num_bytes for dtype in DType} == {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "int64": 8,
        "int32": 4,
        "uint8": 1,
        "bool": 1,
    }


def test_the_geometry_gives_every_shape(geometry: ChunkGeometry) -> None:
    assert geometry.latent_shape(64, 96) == (1, 3, 16, 8, 12)
    assert geometry.context_shape(64, 96, start_frame=9) == (1, 5, 16, 8, 12)
    assert geometry.conditioning_shape == (1, 6, 64)
    assert geometry.pixel_multiple == 16


@pytest.mark.parametrize(("start_frame", "frames"), [(0, 0), (3, 3), (5, 5), (6, 5), (900, 5)])
def test_a_context_is_never_longer_than_what_came_before_it(
    geometry: ChunkGeometry, start_frame: int, frames: int
) -> None:
    assert geometry.context_shape(64, 96, start_frame=start_frame)[1] == frames


@pytest.mark.parametrize(
    ("end_frame", "global_end_index", "local_end_index"),
    [(0, 0, 0), (3, 30, 30), (6, 60, 60), (9, 90, 60)],
)
def test_a_ring_fills_up_and_then_only_its_timeline_goes_on(
    end_frame: int, global_end_index: int, local_end_index: int
) -> None:
    assert KVCacheSpec(**CACHE).indices_at(end_frame) == CacheIndices(
        global_end_index=global_end_index, local_end_index=local_end_index
    )


def test_a_cache_is_sized_without_allocating_it() -> None:
    spec = KVCacheSpec(**CACHE)
    assert spec.capacity_tokens == 60
    assert spec.bytes_per_token == 2 * 2 * 4 * 8 * 2
    assert spec.num_bytes(1) == 3 * 60 * 256
    assert spec.num_bytes(4) * 4 == spec.num_bytes(1)


@pytest.mark.parametrize("tp_degree", [0, -2, 3, 8])
def test_heads_that_cannot_be_shared_evenly_are_the_users_to_change(tp_degree: int) -> None:
    with pytest.raises(UserInputError, match="--tp"):
        KVCacheSpec(**CACHE).num_bytes(tp_degree)


@pytest.mark.parametrize("name", [name for name in CACHE if name != "dtype"])
def test_a_cache_of_no_size_is_refused(name: str) -> None:
    with pytest.raises(CacheError, match=name):
        KVCacheSpec(**CACHE | {name: -1})


@pytest.mark.parametrize(
    ("text", "kind", "codec", "shown"),
    [
        ("ring", CacheKind.RING, CodecKind.IDENTITY, "ring"),
        ("quantized", CacheKind.QUANTIZED, CodecKind.INT8, "quantized:int8"),
        ("quantized:int4", CacheKind.QUANTIZED, CodecKind.INT4, "quantized:int4"),
        ("h2o:fp8", CacheKind.H2O, CodecKind.FP8, "h2o:fp8"),
        ("paged", CacheKind.PAGED, CodecKind.IDENTITY, "paged"),
    ],
)
def test_a_cache_is_chosen_by_one_text(
    text: str, kind: CacheKind, codec: CodecKind, shown: str
) -> None:
    choice = CacheChoice.named(text)
    assert (choice.kind, choice.codec) == (kind, codec)
    assert str(choice) == shown
    assert CacheChoice.named(shown) == choice


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("rings", "one of ring, quantized, h2o, paged, hierarchical"),
        ("h2o:int5", "identity, int8, int4, fp8"),
        ("h2o:", "a codec of"),
        ("ring:int8", "want quantized:int8"),
        ("quantized:identity", "want ring"),
        ("", "one of"),
    ],
)
def test_an_unknown_cache_is_refused_with_what_to_write(text: str, remedy: str) -> None:
    with pytest.raises(UserInputError, match=f"kv_cache .*{remedy}"):
        CacheChoice.named(text)


def test_a_codec_makes_the_same_cache_smaller_scales_included() -> None:
    exact = KVCacheSpec(**CACHE | {"head_dim": 16})
    coded = replace(exact, kind=CacheKind.QUANTIZED, codec=CodecKind.INT8)
    assert exact.num_bytes(1) == 3 * 60 * (2 * 2 * 4 * 16 * 2)
    assert coded.num_bytes(1) == 3 * 60 * (2 * 2 * 4 * (16 + 2))


def test_heavy_hitters_and_recent_frames_share_the_past_of_the_window() -> None:
    spec = KVCacheSpec(**CACHE | {"window_frames": 10, "block_frames": 3, "kind": CacheKind.H2O})
    assert (spec.recent_frames, spec.hitter_frames) == (4, 3)
    assert spec.collectives_per_chunk == 1
    assert replace(spec, kind=CacheKind.RING).collectives_per_chunk == 0


def test_a_cache_may_have_no_sink() -> None:
    assert KVCacheSpec(**CACHE | {"sink_frames": 0}).capacity_tokens == 50
