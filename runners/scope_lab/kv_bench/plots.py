"""Curves become pictures: one PNG for each key, a panel for each curve, measured lines solid.

Points are rings, one line's within another's, so that equal figures hide none of their lines; lines
that all panels share are explained once, below them, where the legend hides nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from scope_lab.kv_bench.result import Curve
from scope_rt import output_file

PANEL_INCHES = (4.6, 3.6)
MOST_COLUMNS = 3
DOTS_PER_INCH = 110
LEGEND_INCHES, MARK_INCHES, LETTER_INCHES = 0.3, 0.6, 0.078
"""Of one row of a legend that stands below the panels, and of a line's mark and letters in it."""
SMALLEST_RING, WIDER_BY = 4, 2.5
"""Points of the last line's rings, and how much wider those of each line before it are."""
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
    names = {tuple(line.name for line in curve.lines) for curve in curves}
    is_shared = len(names) == 1 and len(curves[0].lines) > 1
    longest = max(len(line.name) for line in curves[0].lines)
    legend_columns = max(1, int(width * num_columns / (MARK_INCHES + LETTER_INCHES * longest)))
    legend_rows = -(-len(curves[0].lines) // legend_columns) if is_shared else 0
    size = (width * num_columns, height * num_rows + LEGEND_INCHES * legend_rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axis, curve in zip(axes, curves, strict=False):
        _draw(axis, curve)
        if not is_shared:
            axis.legend(fontsize="small", labelspacing=0.8)
    if is_shared:
        shown = axes[0].get_legend_handles_labels()
        figure.legend(*shown, loc="outside lower center", ncols=legend_columns, fontsize="small")
    for axis in axes[len(curves) :]:
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
            ring = SMALLEST_RING + WIDER_BY * (len(lines) - 1 - index)
            look = {"color": f"C{index}", "markersize": ring, "markerfacecolor": "none"}
            axis.plot(x, y, style, linewidth=1.4, clip_on=False, label=line.name, **look)
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
