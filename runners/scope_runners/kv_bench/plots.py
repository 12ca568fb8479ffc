"""Curves become pictures: one PNG for each key, a panel for each curve, measured lines solid."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from scope_rt.streaming import output_file
from scope_runners.kv_bench.result import Curve

PANEL_INCHES = (4.6, 3.6)
MOST_COLUMNS = 3
DOTS_PER_INCH = 110
_PLAIN = StrMethodFormatter("{x:g}")


def write_plots(curves: Iterable[Curve], folder: Path) -> list[Path]:
    """Draw every picture whole or not at all; returns their paths.

    Raises:
        UserInputError: `folder` cannot be written.
    """
    panels: dict[str, list[Curve]] = defaultdict(list)
    for curve in curves:
        panels[curve.key].append(curve)
    return [_write(folder / f"{key}.png", group) for key, group in panels.items()]


def _write(path: Path, curves: Sequence[Curve]) -> Path:
    num_columns = min(len(curves), MOST_COLUMNS)
    num_rows = -(-len(curves) // num_columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * num_columns, height * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flat
    for axis, curve in zip(axes, curves, strict=False):
        _draw(axis, curve)
    for axis in list(axes)[len(curves) :]:
        axis.set_axis_off()
    with output_file.replacing(path, suffixes=(".png",)) as partial:
        figure.savefig(partial, dpi=DOTS_PER_INCH, format="png")
    return path


def _draw(axis: Any, curve: Curve) -> None:
    """The n-th formula has the colour of the n-th measurement."""
    measured = [line for line in curve.lines if not line.is_model]
    formulas = [line for line in curve.lines if line.is_model]
    for lines, style in ((measured, "o-"), (formulas, "--")):
        for index, line in enumerate(lines):
            x, y = zip(*line.points, strict=True)
            look = {"color": f"C{index}", "markersize": 4, "linewidth": 1.4, "alpha": 0.85}
            axis.plot(x, y, style, label=line.name, **look)
    if curve.log_x:
        axis.set_xscale("log")
        axis.set_xticks(sorted({x for line in measured or formulas for x, _ in line.points}))
        axis.minorticks_off()
        axis.xaxis.set_major_formatter(_PLAIN)
    if curve.log_y:
        axis.set_yscale("log", subs=())
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(_PLAIN)
    elif min(y for line in curve.lines for _, y in line.points) >= 0:
        axis.set_ylim(bottom=0)
    axis.set(title=curve.title, xlabel=curve.x_label, ylabel=curve.y_label)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
