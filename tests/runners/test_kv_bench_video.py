"""What a cache costs in quality is measured against a true past, and held to its bound."""

from scope_rt.config import RuntimeConfig
from scope_rt.session import StreamSession
from scope_runners.kv_bench.result import SystemResult
from scope_runners.kv_bench.video_quality import Length, measure_caches
from scope_runners.kv_bench.video_streams import RING, equal_bytes_folder

INT8 = "quantized:int8"


def to_truth_db(system: SystemResult) -> float:
    (found,) = [each.value for each in system.quality if each.name == "PSNR to truth"]
    return found


def test_int8_stays_within_a_tenth_of_a_decibel_of_the_ring() -> None:
    length = Length(num_clips=1, num_chunks=5, num_viewed_chunks=4)
    ring, int8 = measure_caches((RING, INT8), length).systems
    assert (ring.name, int8.name) == (RING, INT8)
    assert abs(to_truth_db(int8) - to_truth_db(ring)) <= 0.1
    assert to_truth_db(int8) != to_truth_db(ring), "was anything quantized?"
    assert ring.peak_bytes is not None
    assert int8.peak_bytes is not None
    assert int8.peak_bytes < 0.3 * ring.peak_bytes


def test_the_ring_of_equal_bytes_has_the_bytes_of_hierarchical() -> None:
    config = RuntimeConfig()
    with (
        equal_bytes_folder() as folder,
        StreamSession(folder, kv_cache=RING, config=config) as wide,
        StreamSession(kv_cache="hierarchical", config=config) as hierarchical,
    ):
        assert wide.cache_bytes == hierarchical.cache_bytes
