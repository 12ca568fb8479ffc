"""A rank that is far slower than the others, or than it was, is named; a moment accuses nobody."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from scope_contracts import ScalarDigest, SlowRankError
from scope_contracts.arithmetic import ReducedSum
from scope_contracts.errors import IntegrityError, ParityError
from scope_lab.fuzz import seeds
from scope_rt.integrity.evidence import RankEvidence, encode_evidence
from scope_rt.mesh.peer_check import FEWEST_REMEMBERED, PeerCheck, PeerReport

DIGEST = replace(seeds.DIGEST, chunk_index=7)


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
        it.before(DIGEST.chunk_index, lambda: DIGEST)
        it.after(chunk, elapsed_ms, None)
    it.before(DIGEST.chunk_index, lambda: DIGEST)


def test_what_is_compared_is_asked_for_only_where_a_comparison_is_due() -> None:
    asked: list[int] = []

    def digest(chunk: int) -> ScalarDigest:
        asked.append(chunk)
        return DIGEST

    it = replace(check(peer_ms=20.0), every=3)
    for chunk in range(7):
        it.before(chunk, partial(digest, chunk))
    assert asked == [0, 3, 6]


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


def of(result: str, **others: Any) -> RankEvidence:
    return RankEvidence(result=result, **others)


class Group:
    """A group of three, in which every rank has given what is in `given`."""

    def __init__(self, given: list[RankEvidence]) -> None:
        self._sent = [encode_evidence(data) for data in given]
        self.num_gathers = 0

    def gather(self, mine: bytes) -> list[bytes]:
        size, self.num_gathers = 4000, self.num_gathers + 1
        if self.num_gathers == 1:
            return [len(data).to_bytes(4, "little") + data[:size] for data in self._sent]
        start = size * (self.num_gathers - 1)
        return [data[start : start + size] for data in self._sent]

    def after(self, mine: RankEvidence | None) -> None:
        check = PeerCheck(
            ranks=(0, 1, 3), rank=1, every=64, gather=self.gather, waited_s=lambda: 0.0
        )
        check.after(5, 1.0, mine)


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ("aab", "chunk 5: rank 3 computed another result"),
        ("baa", "chunk 5: rank 0 computed another result"),
        ("abc", "chunk 5: ranks 0, 1, 3 computed different results"),
    ],
)
def test_ranks_that_computed_another_result_are_named(results: str, said: str) -> None:
    group = Group([of(result) for result in results])
    with pytest.raises(IntegrityError, match=said):
        group.after(of(results[1]))
    Group([of(result) for result in results]).after(None)  # nothing is verified


def test_equal_results_pass_in_one_gather() -> None:
    group = Group([of("a")] * 3)
    group.after(of("a"))
    assert group.num_gathers == 1


def test_evidence_of_any_length_is_compared() -> None:
    def sums(odd: float) -> tuple[ReducedSum, ...]:
        return tuple(
            ReducedSum(
                name=f"call 0, layer {layer}, self-attention",
                given=1.0,
                got=3.0 + odd * (layer == 799),
                squares=1.0,
                roundoff=2.0**-24,
            )
            for layer in range(800)
        )

    group = Group([of("a", sums=sums(0.0))] * 3)
    group.after(of("a", sums=sums(0.0)))
    assert group.num_gathers > 2
    group = Group([of("a", sums=sums(0.0)), of("a", sums=sums(0.0)), of("a", sums=sums(1e-3))])
    with pytest.raises(IntegrityError, match="chunk 5, rank 3, call 0, layer 799, self-attention"):
        group.after(of("a", sums=sums(0.0)))


def test_a_fixed_chunk_that_changed_is_named_with_its_rank() -> None:
    good, bad = of("a", canary="x", expected_canary="x"), of("a", canary="y", expected_canary="x")
    Group([good] * 3).after(good)
    with pytest.raises(IntegrityError, match="chunk 5: rank 3: the fixed chunk gives y"):
        Group([good, good, bad]).after(good)


def test_a_numeric_setting_that_changed_is_named_before_the_next_chunk() -> None:
    settings = [("threads=1", f"matmul_precision={name}") for name in ("highest", "medium")]
    it = replace(check(peer_ms=None), numerics=lambda: settings[0])
    it.before(DIGEST.chunk_index, lambda: DIGEST)
    it.before(DIGEST.chunk_index, lambda: DIGEST)
    it.numerics = lambda: settings[1]
    with pytest.raises(
        IntegrityError, match=r"rank 1: .* matmul_precision=medium \(was matmul_precision=highest\)"
    ):
        it.before(DIGEST.chunk_index, lambda: DIGEST)


def test_a_numeric_setting_that_changed_between_comparisons_is_named_after_its_chunk() -> None:
    settings = ["a=1", "a=2"]
    it = replace(check(peer_ms=None), every=64, numerics=lambda: (settings[0],))
    it.before(6, lambda: DIGEST)
    it.after(6, 1.0, None)
    it.before(7, lambda: DIGEST)
    settings.reverse()
    with pytest.raises(IntegrityError, match=r"chunk 7: rank 1: .* a=2 \(was a=1\)") as raised:
        it.after(7, 1.0, None)
    assert raised.value.suspect_from == 7


def test_ranks_that_start_with_other_numeric_settings_are_named() -> None:
    def gather(mine: bytes) -> list[bytes]:
        other = PeerReport(digest=DIGEST, busy_ms=0.0, numerics=("cpu=AVX2",))
        return [mine, other.encode()]

    it = replace(check(peer_ms=20.0), gather=gather, numerics=lambda: ("cpu=AVX512", "threads=1"))
    with pytest.raises(ParityError, match="rank 1 has cpu=AVX512, rank 2 has cpu=AVX2"):
        it.before(DIGEST.chunk_index, lambda: DIGEST)
