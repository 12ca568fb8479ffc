"""What was measured, for a person at a terminal or a program: nothing here computes a figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from scope_lab.kv_bench.result import Part, SystemResult

_KIB = 1024
PEAK_NOTE = (
    "peak: what the cache held, and the largest copy that it made to show one layer, of rows that "
    "are decoded or gathered"
)


def table(part: Part) -> str:
    """A markdown table of the systems that ran, and below it what does not fit into one."""
    ran = [system for system in part.systems if not system.cannot_run]
    lines = [f"## {part.title}", ""]
    if ran:
        lines += [*_rows(ran), ""]
    lines += [f"* {note}" for note in part.notes]
    lines += [f"* {PEAK_NOTE}"] * any(system.peak_bytes is not None for system in ran)
    lines += [f"* {system.name}: {note}" for system in ran for note in system.notes]
    lines += [
        f"* {system.name}: not run here: {system.cannot_run}"
        for system in part.systems
        if system.cannot_run
    ]
    return "\n".join(lines).rstrip()


def as_json(parts: Mapping[str, Part]) -> dict[str, object]:
    """Every part by name, as plain values."""
    return {name: asdict(part) for name, part in parts.items()}


def _rows(systems: Sequence[SystemResult]) -> list[str]:
    """Only columns that at least one system fills."""
    columns: dict[str, Callable[[SystemResult], str]] = {
        "B/token": lambda s: _number(s.bytes_per_token),
        "peak KiB": lambda s: _number(None if s.peak_bytes is None else s.peak_bytes / _KIB),
        "x recompute": lambda s: _number(s.throughput_vs_recompute),
        "x contiguous": lambda s: _number(s.throughput_vs_contiguous),
    }
    for key in dict.fromkeys((q.name, q.unit) for s in systems for q in s.quality):
        columns[" ".join(filter(None, key))] = lambda s, key=key: _quality(s, key)  # type: ignore[misc]
    cells = {head: [shown(system) for system in systems] for head, shown in columns.items()}
    filled = {head: column for head, column in cells.items() if any(column)}
    heads = ["system", *filled]
    body = zip((system.name for system in systems), *filled.values(), strict=True)
    rows = [heads, ["---", *["---:"] * len(filled)], *map(list, body)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in rows
    ]


def _quality(system: SystemResult, key: tuple[str, str]) -> str:
    values = [q.value for q in system.quality if (q.name, q.unit) == key]
    return f"{values[0]:.1f}" if values else ""


def _number(value: float | None) -> str:
    """Three significant digits, thousands apart; empty where there is nothing."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
