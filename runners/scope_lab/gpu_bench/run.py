"""One call on one GPU tells what there is to know of it: JSON lines as it goes, within a budget.

Each phase is a process of its own: one that hangs or runs out of memory is ended when its time is
over, and takes nothing else with it. What is most wanted comes first; what no time is left for is
named.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Timer

import torch

from scope_lab.gpu_bench.ceilings import Line, attention, ceilings, machine
from scope_lab.gpu_bench.decoding import decoding
from scope_lab.gpu_bench.sizes import SIZES, Sizes, device_named
from scope_lab.gpu_bench.streams import stream
from scope_runners.command_parser import CommandParser

_ROOT = Path(__file__).parents[3]
_LEAST_S = 3.0
"""Less than this is no time to start a process in."""
Measure = Callable[[Sizes, torch.device], Iterator[Line]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the bench, and the most of the budget that it may take."""

    name: str
    share: float
    measure: Measure | None
    """None for the tests of a GPU."""


def phases_of(sizes: Sizes) -> tuple[Phase, ...]:
    models = list(sizes.models)
    streams = [
        Phase(name=f"stream {name}", share=0.25, measure=partial(stream, name)) for name in models
    ]
    return (
        Phase(name="machine", share=0.1, measure=machine),
        Phase(name="ceilings", share=0.1, measure=ceilings),
        *streams,
        Phase(name="tests/gpu", share=0.35, measure=None),
        Phase(name="decoding", share=0.15, measure=decoding),
        Phase(name="attention", share=0.25, measure=attention),
    )


def main(argv: Sequence[str]) -> int:
    """Print a JSON line for each thing that was measured; 1 where a phase failed."""
    parser = CommandParser(prog="scripts/lab bench-gpu", description=__doc__)
    parser.add_argument("--budget", type=float, default=560.0, help="seconds (default 560)")
    parser.add_argument("--device", default="auto", help="cuda where there is one, else cpu")
    parser.add_argument("--sizes", choices=SIZES, default="real", help="tiny is for a CPU")
    parser.add_argument("--only", help="phases, comma-separated, in the order of the bench")
    parser.add_argument("--out", type=Path, help="a file for the same lines")
    parser.add_argument("--phase", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.phase is not None:
        return _measure(asked.phase, SIZES[asked.sizes], device_named(asked.device))
    only = asked.only.split(",") if asked.only else None
    phases = [each for each in phases_of(SIZES[asked.sizes]) if only is None or each.name in only]
    until_s, failed = time.monotonic() + asked.budget, False
    for phase in phases:
        left_s = until_s - time.monotonic()
        bound_s = min(left_s, phase.share * asked.budget)
        if bound_s < _LEAST_S:
            line: Line = {"phase": phase.name, "skipped": "no time is left"}
            _tell(line, asked.out)
            continue
        command = [sys.executable, "-m", "scope_lab.main", "bench-gpu"]
        command += ["--phase", phase.name, "--sizes", asked.sizes, "--device", asked.device]
        if phase.measure is None:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/gpu"]
            command += ["-p", "no:cacheprovider", "-o", "addopts="]
        failed |= not _run(phase.name, command, bound_s, asked.out)
    return int(failed)


def _measure(name: str, sizes: Sizes, device: torch.device) -> int:
    """In the phase's own process."""
    phase = next(each for each in phases_of(sizes) if each.name == name)
    assert phase.measure is not None, "tests are no phase of this process"
    with torch.inference_mode():
        for line in phase.measure(sizes, device):
            print(json.dumps(line), flush=True)
    return 0


def _run(name: str, command: Sequence[str], bound_s: float, out: Path | None) -> bool:
    """Pass the phase's lines on as they come; False where it failed or was ended."""
    start_s, is_late, last = time.monotonic(), Event(), ""
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=_ROOT
        ) as process,
    ):
        assert process.stdout is not None

        def end() -> None:
            is_late.set()
            process.kill()

        timer = Timer(bound_s, end)
        timer.start()
        for line in process.stdout:
            if line.startswith("{"):
                _tell({"phase": name, **json.loads(line)}, out)
            else:
                last = line.strip() or last
        code = process.wait()
        timer.cancel()
        errors.seek(0)
        said = errors.read().strip()[-300:] or last
    told: Line = {"phase": name, "took_s": round(time.monotonic() - start_s, 2)}
    if last:
        told["said"] = last
    if is_late.is_set():
        told["failed"] = f"ended after {bound_s:.0f} s, its share of the budget"
    elif code:
        told["failed"] = f"ended with {code}: {said}"
    _tell(told, out)
    return "failed" not in told


def _tell(line: Line, out: Path | None) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(text + "\n")
