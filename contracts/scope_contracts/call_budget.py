"""The generator call after the last planned one never starts.

An assertion at the end could not prevent a hang: by then the peers wait in a collective.
"""

from dataclasses import dataclass

from scope_contracts.errors import CallCountError


@dataclass(slots=True)
class CallBudget:
    """Counts the generator calls of one chunk."""

    chunk_index: int
    expected: int
    observed: int = 0

    def enter(self) -> None:
        """Count one call.

        Raises:
            CallCountError: the plan has no such call.
        """
        if self.observed >= self.expected:
            raise CallCountError(
                f"chunk {self.chunk_index}: generator call {self.observed + 1}, "
                f"budget {self.expected}"
            )
        self.observed += 1
