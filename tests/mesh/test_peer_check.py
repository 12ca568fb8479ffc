"""A rank that is far slower than the others, or than it was, is named; a moment accuses nobody."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from scope_contracts import ScalarDigest, SlowRankError
from scope_contracts.errors import IntegrityError, ParityError
from scope_rt.mesh.peer_check import FEWEST_REMEMBERED, PeerCheck, PeerReport

DIGEST = ScalarDigest(
    call_id=0,
    chunk_index=7,
    cache_epoch=0,
    current_start_frame=0,
    init_cache=False,
    reset_crossattn_cache=False,
    do_kv_recompute=False,
    clean_pass=True,
    num_denoise_steps=1,
    denoising_step_list=(1000.0,),
    kv_cache_attention_bias=1.0,
    base_seed=0,
    global_end_index=0,
    local_end_index=0,
)


def check(*, peer_ms: float | None) -> PeerCheck:
    """Of rank 1, beside a rank 2 that takes `peer_ms` a chunk; alone where that is None."""

    def gather(mine: bytes) -> list[bytes]:
        return [mine, PeerReport(digest=DIGEST, busy_ms=peer_ms or 0.0).encode()]

    return PeerCheck(
        ranks=(1,) if peer_ms is None else (1, 2),
        rank=1,
        every=1,
        gather=None if peer_ms is None else gather,
        waited_s=lambda: 0.0,
        slow_factor=4.0,
    )


def run(it: PeerCheck, times_ms: Sequence[float]) -> None:
    for chunk, elapsed_ms in enumerate(times_ms):
        it.before(DIGEST)
        it.after(chunk, elapsed_ms, b"")
    it.before(DIGEST)


def test_a_rank_that_is_far_slower_than_another_is_named() -> None:
    with pytest.raises(SlowRankError, match=r"chunk 7: rank 1 computes 90 ms a chunk where 20 ms"):
        run(check(peer_ms=20.0), [90.0] * FEWEST_REMEMBERED)
    with pytest.raises(SlowRankError, match=r"rank 2 computes 90 ms a chunk where 20 ms"):
        run(check(peer_ms=90.0), [20.0] * FEWEST_REMEMBERED)


def test_a_bad_moment_after_a_start_accuses_nobody() -> None:
    run(check(peer_ms=20.0), [900.0] * (FEWEST_REMEMBERED - 1))
    run(check(peer_ms=20.0), [900.0, 20.0, 20.0])


def test_a_lone_rank_is_measured_against_its_own_past() -> None:
    with pytest.raises(SlowRankError, match=r"chunk 3: rank 1 computes 90 ms a chunk where 20 ms"):
        run(check(peer_ms=None), [20.0, 20.0, 20.0, 90.0])


def test_a_lone_rank_may_become_faster() -> None:
    run(check(peer_ms=None), [90.0, 90.0, 90.0, 90.0, 9.0, 9.0])


@dataclass
class ThreeRanks:
    """The results of ranks 0, 1 and 3, of which this one is rank 1."""

    results: list[bytes]

    def check(self, **settings: Any) -> PeerCheck:
        return PeerCheck(
            ranks=(0, 1, 3),
            rank=1,
            every=64,
            gather=lambda mine: self.results,
            waited_s=lambda: 0.0,
            **settings,
        )


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([b"a", b"a", b"b"], "chunk 5: rank 3 computed another result"),
        ([b"b", b"a", b"a"], "chunk 5: rank 0 computed another result"),
        ([b"a", b"b", b"c"], "chunk 5: ranks 0, 1, 3 computed different results"),
    ],
)
def test_ranks_that_computed_another_result_are_named(results: list[bytes], said: str) -> None:
    with pytest.raises(IntegrityError, match=said):
        ThreeRanks(results).check(compares_results=True).after(5, 1.0, b"a")
    ThreeRanks(results).check().after(5, 1.0, b"a")  # results are not compared


def test_equal_results_pass() -> None:
    ThreeRanks([b"a"] * 3).check(compares_results=True).after(5, 1.0, b"a")


def test_a_numeric_setting_that_changed_is_named_before_the_next_chunk() -> None:
    settings = ["threads=1 matmul_precision=highest", "threads=1 matmul_precision=medium"]
    it = replace(check(peer_ms=None), numerics=lambda: settings[0])
    it.before(DIGEST)
    it.before(DIGEST)
    it.numerics = lambda: settings[1]
    with pytest.raises(
        IntegrityError, match=r"rank 1: .* matmul_precision=medium \(was matmul_precision=highest\)"
    ):
        it.before(DIGEST)


def test_ranks_that_start_with_other_numeric_settings_are_named() -> None:
    def gather(mine: bytes) -> list[bytes]:
        other = PeerReport(digest=DIGEST, busy_ms=0.0, numerics="cpu=AVX2 threads=1")
        return [mine, other.encode()]

    it = replace(check(peer_ms=20.0), gather=gather, numerics=lambda: "cpu=AVX512 threads=1")
    with pytest.raises(ParityError, match="rank 1 has cpu=AVX512, rank 2 has cpu=AVX2"):
        it.before(DIGEST)
