"""What a cache costs in quality is measured against a true past, and held to its bound."""

from dataclasses import replace

import pytest

from scope_contracts.cache_spec import CacheChoice, KVCacheSpec
from scope_contracts.row_format import CodecKind
from scope_contracts.tensor_spec import DType
from scope_lab.cache_peak import stream_peak_bytes
from scope_lab.kv_bench.result import SystemResult
from scope_lab.kv_bench.video_quality import CACHES, Length, measure_caches
from scope_lab.kv_bench.video_streams import RING, equal_bytes_recipe
from scope_rt.config import StreamConfig
from scope_rt.stream_setup import StreamSetup

INT8 = "quantized:int8"
SPEC = KVCacheSpec(
    num_layers=3,
    num_heads=2,
    head_dim=32,
    frame_tokens=4,
    sink_frames=1,
    window_frames=9,
    batch=2,
    dtype=DType.FLOAT32,
    block_frames=3,
)


def to_truth_db(system: SystemResult) -> float:
    (found,) = [each.value for each in system.quality if each.name == "PSNR to truth"]
    return found


@pytest.mark.lab
def test_int8_stays_within_a_tenth_of_a_decibel_of_the_ring() -> None:
    length = Length(num_clips=1, num_chunks=5, num_viewed_chunks=4)
    ring, int8 = measure_caches((RING, INT8), length).systems
    assert (ring.name, int8.name) == (RING, INT8)
    assert abs(to_truth_db(int8) - to_truth_db(ring)) <= 0.1
    assert to_truth_db(int8) != to_truth_db(ring), "was anything quantized?"
    assert ring.bytes_per_token is not None
    assert int8.bytes_per_token is not None
    assert int8.bytes_per_token < 0.3 * ring.bytes_per_token


@pytest.mark.parametrize("kind", CACHES[:-1])
def test_a_streams_peak_counts_the_decoded_copy_of_a_layer_beside_the_cache(kind: str) -> None:
    choice = CacheChoice.named(kind)
    spec = replace(SPEC, kind=choice.kind, codec=choice.codec)
    rows_of_a_layer = spec.batch * spec.capacity_tokens
    exact = rows_of_a_layer * replace(spec.row_format, codec=CodecKind.IDENTITY).bytes_per_row
    copied = 0 if choice.codec is CodecKind.IDENTITY else exact
    assert stream_peak_bytes(spec) == spec.num_bytes(1) + copied


def test_the_ring_of_equal_bytes_has_the_bytes_of_hierarchical() -> None:
    hierarchical = StreamSetup.of(StreamConfig.of(kv_cache="hierarchical")).cache_spec
    with equal_bytes_recipe() as recipe:
        wide = StreamSetup.of(StreamConfig.of(recipe=recipe, kv_cache=RING)).cache_spec
    assert wide.num_bytes(1) == hierarchical.num_bytes(1)
