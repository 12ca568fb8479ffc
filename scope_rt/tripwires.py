"""Every detector has a name, so that it can be shown to matter: disarmed, its fault gets through.

All are armed unless `SCOPE_DISARM` names some, which only the break-it suite and tests do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from scope_contracts.errors import UserInputError


class Tripwire(StrEnum):
    """One detector each."""

    ENV_PARITY = "env_parity"
    """Settings are compared over all ranks before the first model collective."""
    PREFLIGHT = "preflight"
    """Rank0 and the mesh check an envelope by itself."""
    LIFECYCLE = "lifecycle"
    """Every rank checks an envelope against the ones before it."""
    CALL_BUDGET = "call_budget"
    """A generator call that was not planned never starts, and a short count is never committed."""
    ANSWER = "answer"
    """Rank0 checks that a result answers the envelope it sent."""
    EPOCH_DROP = "epoch_drop"
    """A result of an epoch that was cut off is dropped."""
    STATE_DIGEST = "state_digest"
    """Every result tells what was run and where the cache stands."""
    SCALAR_DIGEST = "scalar_digest"
    """Every N chunks the generator ranks compare what they are about to run."""
    INPUT_DIGEST = "input_digest"
    """What arrives on the link is what was sent (`SCOPE_TP_INPUT_DIGEST=1`)."""
    FINGERPRINT = "fingerprint"
    """Weights are those of the checkpoint, at load and every N chunks."""
    HEARTBEAT = "heartbeat"
    """A rank that stops answering is named."""
    SLOW_RANK = "slow_rank"
    """A rank far slower than the others is named (`SCOPE_SLOW_RANK_FACTOR`)."""


@dataclass(frozen=True, slots=True)
class Tripwires:
    """Which detectors are off; none, outside the break-it suite."""

    disarmed: frozenset[Tripwire] = frozenset()

    @classmethod
    def without(cls, names: Iterable[str]) -> Self:
        """All but the named ones.

        Raises:
            UserInputError: there is no detector of that name.
        """
        try:
            return cls(frozenset(Tripwire(name) for name in names))
        except ValueError as error:
            choices = ", ".join(Tripwire)
            raise UserInputError(f"SCOPE_DISARM: {error}; choose from {choices}") from None

    def armed(self, tripwire: Tripwire) -> bool:
        return tripwire not in self.disarmed


ALL_ARMED = Tripwires()
