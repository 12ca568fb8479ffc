"""A million hostile inputs end as they must, or the first that does not lies in a file.

The input of index i is a pure function of target, seed and i: `--seed` and `--first` continue where
another run ended. An input that broke something lies in the folder as TARGET.input, and is run
first until it breaks nothing.
"""

import argparse
import faulthandler
import importlib.util
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from tqdm import tqdm

from scope_contracts.errors import ScopeError, UserInputError
from scope_lab.fuzz.judge import Figures, Judge
from scope_lab.fuzz.targets import TARGETS, Target
from scope_runners.arguments import positive, seed
from scope_runners.command_parser import CommandParser

DEFAULT_COUNT = 100_000
_BATCH = 500
_HANG_S = 20
_STDERR = 2
_MIB = 2**20


class FuzzError(ScopeError):
    """An input was not refused by name; the log says how, and --input runs it alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one target is given: a number of executions or of seconds; 0 is no bound."""

    seed: int
    first: int
    count: int
    seconds: float
    folder: Path


def random_engine(target: Target, share: Share) -> Iterator[Figures]:
    """Inputs of consecutive indices; yields the figures so far, the final ones last."""
    left = share.folder / f"{target.name}.input"
    again = left.read_bytes() if left.exists() else None
    inputs, start_s = count(share.first), time.monotonic()
    with Judge(target, left) as judge:
        if again is not None:
            judge.judge(again)
        while True:
            todo = min(_BATCH, share.count - judge.figures.executions) if share.count else _BATCH
            for index in islice(inputs, todo):
                judge.judge(target.input(share.seed, index))
            yield judge.figures
            ended = 0 < share.count <= judge.figures.executions
            if ended or 0 < share.seconds <= time.monotonic() - start_s:
                return


def atheris_engine(target: Target, share: Share) -> Iterator[Figures]:
    """Inputs guided by coverage; yields the figures so far, the final ones last.

    Raises:
        FuzzError: the process ended because of an input.
    """
    share.folder.mkdir(parents=True, exist_ok=True)
    bounds = [str(share.seed), str(share.count), str(share.seconds), str(share.folder)]
    command = [sys.executable, "-m", "scope_lab.fuzz.guided", target.name, *bounds]
    log = share.folder / f"{target.name}.log"
    with (
        open(log, "a") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                yield Figures.from_json(line)
            else:
                errors.write(line)
    if child.returncode != 0:
        raise FuzzError(
            f"{target.name}: ended with {child.returncode}; its last words are in {log}"
        )


ENGINES = {"random": random_engine, "atheris": atheris_engine}


def main(argv: Sequence[str]) -> int:
    """Exit 0 when every input ended as it must, 1 when one did not, 2 for wrong arguments."""
    args = _parser().parse_args(argv)
    names = list(TARGETS) if args.target == "all" else [args.target]
    if args.input is not None:
        return _run_input(names, args.input)
    if args.engine == "atheris" and importlib.util.find_spec("atheris") is None:
        raise UserInputError("--engine atheris needs atheris; pip install 'scope-rt[fuzz]'")
    num_inputs = 0 if args.minutes else args.count or DEFAULT_COUNT
    for index, name in enumerate(names):
        share = Share(
            seed=args.seed,
            first=args.first,
            count=(num_inputs + index) // len(names),
            seconds=(args.minutes or 0) * 60 / len(names),
            folder=args.out,
        )
        start_s = time.monotonic()
        figures = _watched(ENGINES[args.engine](TARGETS[name], share), share)
        print(figures.to_json() if args.json else _table(figures, time.monotonic() - start_s))
    return 0


def _run_input(names: list[str], file: Path) -> int:
    if len(names) != 1:
        raise UserInputError("--input needs one --target")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserInputError(f"--input {file}: {error.strerror}") from error
    print(f"{names[0]}: {TARGETS[names[0]].verdict(data)}")
    return 0


def _watched(progress: Iterator[Figures], share: Share) -> Figures:
    """The last of `progress`, with a line about the others on a terminal."""
    figures = None
    total = share.count or None
    with (
        tqdm(total=total, unit=" inputs", disable=not sys.stderr.isatty(), leave=False) as bar,
        _no_hang() as go_on,
    ):
        for figures in progress:
            go_on()
            bar.set_description(figures.target, refresh=False)
            bar.update(figures.executions - bar.n)
    if figures is None:
        raise FuzzError("nothing was run")
    return figures


@contextmanager
def _no_hang() -> Iterator[Callable[[], None]]:
    """End the process, with a traceback, when what is yielded was not called for too long.

    Time is that of the processor: on a busy machine a process may wait for minutes.
    """

    def go_on() -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, _HANG_S)

    faulthandler.register(signal.SIGVTALRM, file=_STDERR, chain=True)
    go_on()
    try:
        yield go_on
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        faulthandler.unregister(signal.SIGVTALRM)


def _table(figures: Figures, elapsed_s: float) -> str:
    refused = ", ".join(f"{name} {n:,}" for name, n in figures.refused.items())
    return (
        f"{figures.target}: {figures.executions:,} inputs in {elapsed_s:.0f} s, "
        f"{figures.accepted:,} accepted\n"
        f"  refused: {refused}\n"
        f"  longest {figures.worst_s * 1e3:.1f} ms, most memory for one "
        f"{figures.peak_bytes / _MIB:.2f} MiB, process grew by "
        f"{figures.rss_growth_bytes / _MIB:.1f} MiB to {figures.rss_bytes / _MIB:.0f} MiB"
    )


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return minutes


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="scripts/lab fuzz", description=__doc__)
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--count", type=positive, help=f"inputs in all (default {DEFAULT_COUNT:,})")
    bound.add_argument("--minutes", type=_minutes, help="minutes in all, instead of a number")
    parser.add_argument("--target", choices=(*TARGETS, "all"), default="all")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="random")
    parser.add_argument("--seed", type=seed, default=0, help="equal seeds give equal inputs")
    parser.add_argument("--first", type=int, default=0, help="index of the first input (random)")
    parser.add_argument("--input", type=Path, metavar="FILE", help="run this one input")
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"), metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print one JSON object a target")
    return parser
