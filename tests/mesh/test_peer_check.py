"""A rank that is far slower than the others, or than it was, is named; a moment accuses nobody."""

from collections.abc import Sequence

import pytest
from torch import nn

from scope_contracts import ScalarDigest, SlowRankError
from scope_rt.mesh.peer_check import FEWEST_REMEMBERED, PeerCheck, PeerReport
from scope_rt.models.fingerprint import Fingerprint

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
        fingerprint=Fingerprint(nn.Linear(1, 1)),
        waited_s=lambda: 0.0,
        slow_factor=4.0,
    )


def run(it: PeerCheck, times_ms: Sequence[float]) -> None:
    for chunk, elapsed_ms in enumerate(times_ms):
        it.before(DIGEST)
        it.after(chunk, elapsed_ms)
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
