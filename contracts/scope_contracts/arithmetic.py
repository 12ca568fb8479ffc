"""A number that was computed twice may differ by what rounding allows, and by nothing more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scope_contracts.errors import IntegrityError

LAMBDA = 8.0
"""Standard deviations of a rounding error that no bound is below: a sum exceeds `LAMBDA` of them
with probability 2 exp(-LAMBDA**2 / 2), or 3e-14 (Higham and Mary 2019, theorem 2.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One number that a rank computed, and what it must be."""

    where: str
    """Chunk, rank, call, layer and token."""
    stage: str
    got: float
    want: float
    bound: float
    """Largest difference that rounding explains."""

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.stage}: got {self.got:.9g}, want {self.want:.9g} within "
            f"{self.bound:.3g}"
        )


def check_deviation(deviation: Deviation) -> None:
    """Raises `IntegrityError` where the number is off by more than its bound, or is none."""
    if not abs(deviation.got - deviation.want) <= deviation.bound:
        raise IntegrityError(str(deviation))


def check_written_rows(where: str, plane: str, got: float, want: float, bound: float) -> None:
    """Raises `IntegrityError` where a cached row is not the one that was given to the cache.

    `got` and `want` are its number that is furthest off, beyond the codec's `bound` (0 where all
    bits are kept).
    """
    if not abs(got - want) <= bound:
        stage = f"cached {plane}"
        raise IntegrityError(
            str(Deviation(where=where, stage=stage, got=got, want=want, bound=bound))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedSum:
    """One kind of all-reduce of a layer as a rank saw it, over the calls that are watched.

    Sums are weighted with signs that are the same on all ranks.
    """

    name: str
    """Call, layer and all-reduce."""
    given: float
    """Of this rank's own parts."""
    got: float
    """Of what came back."""
    squares: float
    """Of its own parts, without signs: how large rounding may be."""
    roundoff: float
    """Unit roundoff of the numbers that are added."""


def check_sums(chunk: int, reports: Sequence[Sequence[ReducedSum]], ranks: Sequence[int]) -> None:
    """Compare what each rank got back from all-reduces with what all of them gave.

    A number that is the sum of P parts is off by at most (P - 1) u times the sum of their sizes,
    which is at most sqrt(P) times the root of their squares; with signs such errors add up as a
    random walk does (Higham and Mary 2019). `reports` come in the order of `ranks`.

    Raises:
        IntegrityError: ranks watched other all-reduces, or a sum is not that of its parts.
    """
    names = [[each.name for each in report] for report in reports]
    for rank, theirs in zip(ranks, names, strict=True):
        if theirs != names[0]:
            raise IntegrityError(
                f"chunk {chunk}: rank {rank} watched the all-reduces {theirs}, rank {ranks[0]} "
                f"{names[0]}"
            )
    parts = len(ranks)
    for sums in zip(*reports, strict=True):
        want = math.fsum(each.given for each in sums)
        size = math.sqrt(math.fsum(each.squares for each in sums))
        bound = LAMBDA * max(1, parts - 1) * math.sqrt(parts) * sums[0].roundoff * size
        for rank, each in zip(ranks, sums, strict=True):
            if not abs(each.got - want) <= bound:
                where = f"chunk {chunk}, rank {rank}, {each.name}"
                stage = "sum of what came back against the sum of all ranks' parts"
                raise IntegrityError(
                    str(Deviation(where=where, stage=stage, got=each.got, want=want, bound=bound))
                )


def check_canary(chunk: int, digests: Sequence[str], ranks: Sequence[int], expected: str) -> None:
    """Compare what the fixed chunk gave on each of `ranks` with its first run.

    Raises:
        IntegrityError: naming the rank.
    """
    for rank, digest in zip(ranks, digests, strict=True):
        if digest != expected:
            raise IntegrityError(
                f"chunk {chunk}: rank {rank}: the fixed chunk gives {digest}, in its first run it "
                f"gave {expected}: weights, kernels or the device changed"
            )
