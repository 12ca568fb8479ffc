"""Results as a person reads them in 120 columns, and as a program reads them."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from textwrap import wrap

from scope_runners.break_it.scenario import Case
from scope_runners.break_it.verdict import Result, Verdict

_COLUMNS = {
    "#": 2,
    "fault": 23,
    "plan": 9,
    "expected (ranks)": 17,
    "seen (ranks)": 28,
    "found": -5,
    "made": -4,
    "wrong": -5,
    "again": -5,
    "left": -4,
    "verdict": 8,
}
"""Widths; a negative one aligns to the right."""
LEGEND = (
    "seen: a rank that `left` ended in order; found: seconds from the fault to the first expected "
    "error; made: chunks\nemitted; wrong: of these, not bit for bit those of a clean run (after an "
    "IntegrityError they are retracted);\nagain: seconds from that error to the next chunk after a "
    "restart; left: processes left behind"
)


def listing(cases: Iterable[Case]) -> str:
    """Every case: number, name and what is broken."""
    return "\n".join(f"{case.number:>2}  {case.name:24}  {case.description}" for case in cases)


def head() -> str:
    """The first lines of the table."""
    rule = ["-" * abs(width) for width in _COLUMNS.values()]
    return "\n".join([LEGEND, "", *_lines(list(_COLUMNS)), *_lines(rule)])


def rows(result: Result) -> str:
    """One fault: a row, and its complaints and remarks below."""
    cells = [
        f"{result.number:>2}",
        result.name,
        f"{result.plan}/{result.tp}",
        result.expected,
        _grouped(result.ends),
        _seconds(result.detected_s),
        str(result.num_chunks),
        str(result.num_wrong),
        _seconds(result.resumed_s),
        str(result.num_left_behind),
        str(result.verdict),
    ]
    remarks = (*result.complaints, *result.notes)
    lines = [f"     {line}" for remark in remarks for line in wrap(remark, 115)]
    if result.verdict.is_failure:
        lines += [f"     | {sentence[:113]}" for sentence in result.sentences]
        lines.append(f"     its files: {result.folder}")
    return "\n".join([*_lines(cells), *lines])


def tally(results: Sequence[Result]) -> str:
    """How many faults ended how, and which were not tried."""
    counts = Counter(_how(result) for result in results)
    parts = ", ".join(f"{number} {how}" for how, number in counts.items())
    missing = [result.name for result in results if result.verdict is Verdict.NOT_RUN]
    return f"{len(results)} runs: {parts}" + (f" ({', '.join(missing)})" if missing else "")


def _how(result: Result) -> str:
    """A fault that had no effect was not caught."""
    if result.verdict is not Verdict.PASSED:
        return str(result.verdict)
    return "unharmed" if result.is_unharmed else "caught"


def as_json(results: Iterable[Result]) -> str:
    """Everything that is known about every fault."""
    return json.dumps([asdict(result) for result in results], indent=2)


def _grouped(ends: Sequence[str]) -> str:
    """How the ranks ended: `PeerLostError 0 1, killed 2`."""
    ranks: dict[str, list[int]] = {}
    for rank, end in enumerate(ends):
        ranks.setdefault(end, []).append(rank)
    return ", ".join(f"{end} {' '.join(map(str, which))}" for end, which in ranks.items())


def _seconds(duration_s: float | None) -> str:
    return "" if duration_s is None else f"{duration_s:.2f}"


def _lines(cells: Sequence[str]) -> list[str]:
    """The cells side by side, each in as many lines as it needs."""
    widths = list(_COLUMNS.values())
    wrapped = [wrap(c, abs(w)) or [""] for c, w in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(map(len, wrapped))):
        parts = [part[number] if number < len(part) else "" for part in wrapped]
        aligned = [
            part.rjust(-width) if width < 0 else part.ljust(width)
            for part, width in zip(parts, widths, strict=True)
        ]
        lines.append(" ".join(aligned).rstrip())
    return lines
