"""After a loss the ranks that are left verify what they hold, and tell rank0 before they leave.

The next start rebuilds the cache from chunks that they have made, and only they can tell whether
these were made from what they should. Of a rank that was lost nobody can.
"""

import time
from collections.abc import Collection

import torch.distributed as dist

from scope_contracts.errors import IntegrityError
from scope_rt.mesh.authentic import SealedStore
from scope_rt.mesh.reported import Failure, reported_error

PATIENCE_S = 0.8
"""How long rank0 waits to hear from all that are left: the launcher ends what still runs
`LINGER_S` (1.5 s) after the first rank has ended."""
_LOOK_S = 0.01
_VERIFIED = b"verified"


class Survivors:
    """What the ranks of this start found when one of them was lost."""

    def __init__(self, values: SealedStore, *, rank: int) -> None:
        self._values, self._rank = values, rank

    def tell(self, found: IntegrityError | None) -> None:
        """Of this rank; None where all it holds is what it was. Blocks for one answer of the store,
        and says nothing where the store is gone too."""
        told = _VERIFIED if found is None else Failure.of(found).encode()
        try:
            self._values.write(_name(self._rank), told)
        except dist.DistError:
            return

    def hear(self, ranks: Collection[int]) -> frozenset[int]:
        """Those of `ranks` that hold what they should, once all but one of them have told.

        Blocks `PATIENCE_S` at most, and for the store's last answer.

        Raises:
            IntegrityError: what one of them found.
        """
        verified, deadline_s = set[int](), time.monotonic() + PATIENCE_S
        while True:
            verified |= {rank for rank in ranks if rank not in verified and self._has_told(rank)}
            if len(verified) >= len(ranks) - 1 or time.monotonic() >= deadline_s:
                return frozenset(verified)
            time.sleep(_LOOK_S)

    def _has_told(self, rank: int) -> bool:
        try:
            told = self._values.read(_name(rank))
        except dist.DistError:
            return False
        if told is None or told == _VERIFIED:
            return told is not None
        found = reported_error(told)
        if isinstance(found, IntegrityError):
            raise found
        return False


def _name(rank: int) -> str:
    return f"held/{rank}"
