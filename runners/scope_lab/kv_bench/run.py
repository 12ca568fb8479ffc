"""`scripts/lab kv_bench`: every part is run the same way, and no failure hides another part."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from importlib import import_module
from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_lab.kv_bench.report import as_json, table
from scope_lab.kv_bench.result import Effort, Part
from scope_rt.output_file import claim
from scope_runners.arguments import positive
from scope_runners.command_parser import CommandParser


class PartName(StrEnum):
    """What can be measured; each is a module of this package with `measure`."""

    VIDEO = "video"
    STORAGE = "storage"
    STATES = "states"
    NEEDLE = "needle"
    H2O = "h2o"
    PAGED = "paged"
    HIERARCHICAL = "hierarchical"


_MODULES = {PartName.VIDEO: "video_quality"}
"""Where the module is not called as the part is."""

Measure = Callable[[Effort], Part]


def main(argv: Sequence[str]) -> int:
    """Measure, print and draw; the exit code.

    Raises:
        UserInputError: a library that a part needs is not installed, or `--out` cannot be written;
            nothing was measured.
    """
    import torch

    args = _parser().parse_args(argv)
    measures = {name: _measure_of(name) for name in args.only}
    if args.out is not None:
        _require("matplotlib")
        claim(args.out / "plots.png", suffixes=(".png",)).unlink()
    torch.set_num_threads(args.threads)
    effort = Effort.QUICK if args.quick else Effort.FULL
    parts = _measured(measures, effort, show_progress=not args.json)
    if args.json:
        print(json.dumps({"effort": effort, "parts": as_json(parts)}))
    if args.out is not None:
        from scope_lab.kv_bench.plots import write_plots

        for path in write_plots((c for part in parts.values() for c in part.curves), args.out):
            print(f"plot: {path}", file=sys.stderr)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="scripts/lab kv_bench",
        description="Bytes, throughput and quality of every KV-cache system.",
        epilog="Throughput is a ratio to another system in the same run, never to a clock.",
    )
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        type=PartName,
        choices=list(PartName),
        default=list(PartName),
        metavar="PART",
        help=f"parts to measure, of {', '.join(PartName)} (all)",
    )
    add("--quick", action="store_true", help="seconds a part; the figures are rough")
    add("--json", action="store_true", help="one JSON object instead of tables")
    add("--out", type=Path, metavar="FOLDER", help="folder for plots (PNG)")
    add("--threads", type=positive, default=1, help="CPU threads (%(default)s)")
    return parser


def _measured(
    measures: Mapping[PartName, Measure], effort: Effort, *, show_progress: bool
) -> dict[str, Part]:
    """Every part; `show_progress` prints each as soon as it is measured."""
    parts: dict[str, Part] = {}
    for name, measure in measures.items():
        print(f"kv-bench: {name} ...", file=sys.stderr, flush=True)
        parts[name] = measure(effort)
        if show_progress:
            print(table(parts[name]), end="\n\n", flush=True)
    return parts


def _measure_of(name: PartName) -> Measure:
    if name is not PartName.VIDEO:
        _require("transformers")
    module = import_module(f"scope_lab.kv_bench.{_MODULES.get(name, name)}")
    measure: Measure = module.measure
    return measure


def _require(library: str) -> None:
    try:
        import_module(library)
    except ModuleNotFoundError as error:
        raise UserInputError(
            f"kv-bench needs {library}, which is not installed; run it as "
            "`scripts/lab kv_bench`, which installs it"
        ) from error
