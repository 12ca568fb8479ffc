"""Weights in use are the weights of the checkpoint, bit for bit, and stay so.

A checksum weighs every bit by its place in the whole tensor, modulo 2^64, so the checksums
of a tensor's shards, each at its place, add up to the checksum of the whole.
"""

from collections.abc import Callable, Mapping, Sequence

from scope_contracts.errors import FingerprintError

Checksums = Mapping[str, int]
"""One per weight, by the weight's name."""


def check_loaded(
    by_rank: Mapping[int, Checksums], whole: Checksums, is_sharded: Callable[[str], bool]
) -> None:
    """Compare what all generator ranks loaded with the `whole` checkpoint, in the dtype of use.

    Of a weight that is not sharded each rank holds all.

    Raises:
        FingerprintError: naming the weight, and the rank where one alone is off.
    """
    for name, want in whole.items():
        if is_sharded(name):
            if sum(sums[name] for sums in by_rank.values()) % 2**64 != want:
                raise FingerprintError(
                    f"weight {name}: the shards of ranks {sorted(by_rank)} do not add up to the "
                    "checkpoint"
                )
            continue
        for rank, sums in by_rank.items():
            if sums[name] != want:
                raise FingerprintError(f"rank {rank}: weight {name} is not the checkpoint's")


def added_up(by_rank: Mapping[int, Checksums], is_sharded: Callable[[str], bool]) -> dict[str, int]:
    """Those of whole weights, from those of all ranks' parts; of a weight that is not sharded, that
    of the first rank."""
    first, *others = by_rank.values()
    return {
        name: (checksum + sum(sums[name] for sums in others)) % 2**64
        if is_sharded(name)
        else checksum
        for name, checksum in first.items()
    }


def check_unchanged(rank: int, chunk: int, changed: Sequence[str]) -> None:
    """Refuse weights that `rank` has in its memory otherwise than it loaded them.

    Raises:
        FingerprintError: naming the first of those that `changed`.
    """
    if changed:
        raise FingerprintError(
            f"chunk {chunk}: rank {rank}: weight {changed[0]} is not what was loaded"
        )
