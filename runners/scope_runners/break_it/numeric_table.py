"""What finds each numeric fault, after how many chunks, and what happens without it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scope_contracts.integrity import IntegrityLevel
from scope_runners.break_it.numeric import LEVELS
from scope_runners.break_it.trials import TrialResult
from scope_runners.break_it.verdict import Result, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericResult:
    """One fault at the levels that find it, and at the strictest without the layer that does."""

    fault: str
    by_level: Mapping[IntegrityLevel | None, Result]
    without: TrialResult | None
    """None where no layer can be disarmed."""

    @property
    def shows_it(self) -> bool:
        """Whether every level did what it must, and the layer is no decoration."""
        is_found = all(result.verdict is Verdict.PASSED for result in self.by_level.values())
        return is_found and (self.without is None or self.without.shows_it)

    @property
    def progress(self) -> str:
        """In a line, while others are tried."""
        end = "found, and not without its layer" if self.shows_it else "NOT as it must be"
        return f"{self.fault}: {end}"


def numeric_table(results: Sequence[NumericResult]) -> str:
    """As Markdown, for the terminal and for the runbook."""
    lines = [
        f"| fault | found by | {' | '.join(LEVELS)} | without it, in {LEVELS[-1]} |",
        "|---|---|---|---|---|",
    ]
    for each in results:
        *_, strictest = each.by_level.values()
        fault = f"{strictest.number} `{each.fault}` on {strictest.plan}"
        found = " | ".join(_found(each.by_level.get(level)) for level in LEVELS)
        lines.append(f"| {fault} | {_layer(each)} | {found} | {_without(each)} |")
    return "\n".join(lines)


def _layer(result: NumericResult) -> str:
    if result.without is None:
        *_, strictest = result.by_level.values()
        return f"{strictest.expected}, which cannot be disarmed"
    return " and ".join(f"`{name}`" for name in result.without.trial.disarmed)


def _found(result: Result | None) -> str:
    """When, and how many chunks that are wrong were shown until then."""
    if result is None:
        return "not found"
    if result.verdict is not Verdict.PASSED:
        return f"**{result.verdict}**: {result.num_wrong} shown wrong"
    after = result.detected_chunks or 0  # what cannot run at all names no chunk
    return f"after {after}, {result.num_wrong} shown wrong"


def _without(result: NumericResult) -> str:
    if result.without is None:
        return ""
    return f"**{result.without.outcome}**: {result.without.what_happened}"
