"""What a test of a fault asks for: its row, after it passed; not a test itself."""

from dataclasses import dataclass

from scope_runners.break_it.catalogue import case_named
from scope_runners.break_it.suite import Suite
from scope_runners.break_it.table import rows
from scope_runners.break_it.verdict import Result, Verdict

HEARTBEAT_S = 5.0
"""Within this a silent rank is named in these tests."""


@dataclass(frozen=True)
class Broken:
    """Breaks a stream and holds what came of it against what was expected."""

    suite: Suite

    def __call__(self, name: str) -> Result:
        """The row of a fault that was refused as it must be, and left nothing wrong behind."""
        result = self.suite.run(case_named(name))
        assert result.verdict is Verdict.PASSED, rows(result)
        assert result.num_wrong == result.num_left_behind == 0
        return result


def said(result: Result, rank: int) -> str:
    """What a rank's first error says, its class first."""
    (sentence,) = [s for s in result.sentences if s.startswith(f"rank {rank}: ")]
    return sentence.removeprefix(f"rank {rank}: ")
