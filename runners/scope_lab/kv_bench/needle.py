"""The needle sweep: all systems read the same texts; those that evict keep equally many rows."""

from collections.abc import Sequence
from typing import Any

from scope_lab.kv_bench.result import Curve, Effort, Line, Part, Quality, SystemResult
from scope_lab.recall.model import load_recall_model
from scope_lab.recall.sweep import PIECE_TOKENS, Cell, measure_cell
from scope_lab.recall.systems import EVICTING, FULL, SYSTEMS, bytes_per_token
from scope_lab.recall.tasks import MEANINGS, Task

LENGTHS = {Effort.QUICK: (128,), Effort.FULL: (128, 256, 512)}
TEXTS_PER_DEPTH = {Effort.QUICK: 2, Effort.FULL: 10}
CAPACITIES = {Effort.QUICK: (16, 32), Effort.FULL: (16, 32, 64, 128)}
"""Rows a layer keeps, in the curves."""
CAPACITY = 32
"""Rows a layer keeps, in the table."""
CURVE_LENGTH = {Effort.QUICK: 128, Effort.FULL: 256}


def measure(effort: Effort) -> Part:
    """Accuracy over task, length and depth at one budget, and over budgets at one length."""
    model = load_recall_model()
    num_texts, curve_length = TEXTS_PER_DEPTH[effort], CURVE_LENGTH[effort]
    cells = [
        measure_cell(
            model, system=system, task=task, length=length, capacity=rows, num_texts=num_texts
        )
        for length in LENGTHS[effort]
        for task in Task
        for system in SYSTEMS
        for rows in _capacities(system, CAPACITIES[effort] if length == curve_length else ())
    ]
    in_table = [cell for cell in cells if cell.capacity in (None, CAPACITY)]
    at_curve = [cell for cell in cells if cell.length == curve_length]
    return Part(
        title=f"Needle sweep: right answers of the recall model, {CAPACITY} rows a layer",
        systems=tuple(
            _row(model, [c for c in in_table if (c.system, c.length) == (system, length)])
            for length in LENGTHS[effort]
            for system in SYSTEMS
        ),
        curves=tuple(
            of_task([cell for cell in at_curve if cell.task is task])
            for of_task in (_budget_curve, _depth_curve)
            for task in Task
        ),
        notes=(
            f"texts are fed {PIECE_TOKENS} tokens at a time, so a policy chooses before it knows "
            f"the question; {num_texts} texts at each of {len(cells[0].right)} depths a figure",
            "the words of this language say nothing and look it, so attention finds facts before "
            "they are asked for; facts in natural text are not marked like that",
            "random draws rows by position, the same in all texts, so its figures come in steps",
            *(f"{task}: {MEANINGS[task]}" for task in Task),
        ),
    )


def _capacities(system: str, of_curve: Sequence[int]) -> Sequence[int | None]:
    return sorted({*of_curve, CAPACITY}) if system in EVICTING else (None,)


def _row(model: Any, cells: Sequence[Cell]) -> SystemResult:
    """All tasks of one system at one length."""
    any_cell = cells[0]
    return SystemResult(
        name=f"{any_cell.system}, {any_cell.length} tokens",
        bytes_per_token=bytes_per_token(model, any_cell.system),
        peak_bytes=max(cell.peak_bytes for cell in cells),
        quality=tuple(
            Quality(name=cell.task, value=100 * cell.accuracy, unit="%") for cell in cells
        ),
    )


def _budget_curve(cells: Sequence[Cell]) -> Curve:
    """Accuracy of one task over the rows that are kept."""
    kept = sorted({cell.capacity for cell in cells if cell.capacity is not None})
    lines = [
        Line(
            name=system,
            points=tuple(
                (rows, 100 * cell.accuracy)
                for rows in kept
                for cell in cells
                if cell.system == system and cell.capacity in (None, rows)
            ),
        )
        for system in (FULL, *EVICTING)
    ]
    return Curve(
        key="needle_budget",
        title=f"{cells[0].task}, {cells[0].length} tokens",
        x_label="rows kept a layer",
        y_label="right answers, %",
        lines=tuple(lines),
        log_x=True,
    )


def _depth_curve(cells: Sequence[Cell]) -> Curve:
    """Accuracy of one task over the depth of the fact, at the table's budget."""
    return Curve(
        key="needle_depth",
        title=f"{cells[0].task}, {cells[0].length} tokens, {CAPACITY} rows",
        x_label="depth of the fact (0: start of the text)",
        y_label="right answers, %",
        lines=tuple(
            Line(
                name=cell.system,
                points=tuple((depth, 100 * share) for depth, share in cell.right),
            )
            for cell in cells
            if cell.system == FULL or cell.capacity == CAPACITY
        ),
    )
