"""`scope-rt break-it`: a stream is broken in every way we know, on the model you mean to run."""

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

from scope_contracts.cache_spec import CacheChoice
from scope_contracts.errors import ScopeError, UserInputError
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.topology import PIPELINED, RUNNABLE, Topology
from scope_runners.arguments import one_of, positive, positive_number
from scope_runners.break_it.catalogue import CASES, WHERE_MEASURED, chosen
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.driver import Driver, recomputing_family
from scope_runners.break_it.numeric_table import NumericResult, numeric_table
from scope_runners.break_it.scenario import Case
from scope_runners.break_it.suite import Suite
from scope_runners.break_it.table import as_json, head, listing, rows, tally
from scope_runners.break_it.trials import TrialResult, detectors_table
from scope_runners.break_it.verdict import Result, Verdict
from scope_runners.exit_codes import FAILED
from scope_runners.parts import add_parts_argument, register_parts

BOUND_S = 90


def add_break_it_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt break-it`."""
    add = parser.add_argument
    add("faults", nargs="*", metavar="NAME", help="a fault's name or number; see --list")
    add("--all", action="store_true", help="every fault")
    add("--list", action="store_true", help="show the faults and end")
    add(
        "--detectors",
        action="store_true",
        help="disarm each detector in turn, and show that its fault then hangs or drifts; with "
        "names, those of these faults",
    )
    add(
        "--numeric",
        action="store_true",
        help="show what finds each fault of numbers, after how many chunks at each level of "
        "integrity, and what happens without it; with names, for these faults",
    )
    add(
        "--disarm",
        action="append",
        default=[],
        choices=list(Detector),
        metavar="DETECTOR",
        help=f"break things without this detector: {', '.join(Detector)}",
    )
    add(
        "--plan",
        type=one_of(RUNNABLE),
        help=f"one of {', '.join(RUNNABLE)} for all faults (default: what each is about)",
    )
    add("--tp", type=positive, help="TP degree with --plan (default: the plan's smallest)")
    add(
        "--kv-cache",
        metavar="KIND",
        help="of all streams, such as quantized:int8, paged, h2o or hierarchical (default: ring)",
    )
    add(
        "--model",
        default=EMBEDDED,
        metavar="FOLDER",
        help=f"a model folder, or {EMBEDDED!r} for the embedded model (default)",
    )
    add("--recipe", metavar="NAME", help="of the model, as of `scope-rt stream`")
    add_parts_argument(parser)
    add("--prompt", default="a red circle", help="words that the model's text encoder knows")
    add(
        "--bound",
        type=positive_number,
        default=BOUND_S,
        metavar="SECONDS",
        help=f"one start of the ranks that takes longer is called hung (default {BOUND_S})",
    )
    add("--json", action="store_true", help="print one JSON array instead of the table")


def run_break_it(namespace: argparse.Namespace) -> int:
    """Run the command; 0 when every fault that was tried ended as it must.

    Raises:
        UserInputError: the arguments ask for something that cannot be run here.
        ScopeError: no fault could be tried, or a stream in which nothing is broken does not work.
    """
    if namespace.list:
        print(f"{listing(CASES)}\n10  {WHERE_MEASURED}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing may stay behind
    cases = _cases(namespace)
    register_parts(namespace.parts)
    model = ModelFolder.open(namespace.model, namespace.recipe)
    topology = _topology(namespace)
    kv_cache = namespace.kv_cache and str(CacheChoice.named(namespace.kv_cache))
    model.check_parts()
    for degree in {(topology or case.default_topology).tp_degree for case in cases}:
        model.config.check_degree(degree)
    folder, is_kept = Path(mkdtemp(prefix="scope-break-it-")), False
    try:
        driver = Driver(
            model=namespace.model,
            family=namespace.recipe,
            recomputing_family=recomputing_family(model, namespace.recipe, folder),
            recipe=model.recipe,
            parts=namespace.parts,
            prompt=namespace.prompt,
            folder=folder,
            bound_s=namespace.bound,
        )
        suite = Suite(driver=driver, topology=topology, kv_cache=kv_cache)
        if namespace.detectors:
            trials = suite.trials(cases)
            is_kept = not _run_disarming(trials, detectors_table, print_json=namespace.json)
        elif namespace.numeric:
            numeric = suite.numeric(cases)
            is_kept = not _run_disarming(numeric, numeric_table, print_json=namespace.json)
        else:
            is_kept = not _run_faults(suite, cases, namespace)
    finally:
        if not is_kept:  # the table has said where
            shutil.rmtree(folder)
    return FAILED if is_kept else 0


def _cases(namespace: argparse.Namespace) -> tuple[Case, ...]:
    disarms_itself = namespace.detectors or namespace.numeric
    if disarms_itself and namespace.disarm:
        option = "--detectors" if namespace.detectors else "--numeric"
        raise UserInputError(f"{option} disarms each detector itself; drop --disarm")
    if namespace.all or (disarms_itself and not namespace.faults):
        return CASES
    if not namespace.faults:
        raise UserInputError("name a fault or its number, or --all; --list shows them")
    return chosen(namespace.faults, among=CASES)


def _topology(namespace: argparse.Namespace) -> Topology | None:
    if namespace.plan is None:
        if namespace.tp is not None:
            raise UserInputError("--tp needs a --plan; without one, each fault has its own")
        return None
    alone = namespace.plan in PIPELINED or namespace.plan == "single"
    return Topology(plan_id=namespace.plan, tp_degree=namespace.tp or (1 if alone else 2))


def _run_faults(suite: Suite, cases: tuple[Case, ...], namespace: argparse.Namespace) -> bool:
    """Run and show them; whether all ended as they must.

    Raises:
        ScopeError: none could be tried.
    """
    results: list[Result] = []
    if not namespace.json:
        print(head(), flush=True)
    disarmed = tuple(map(Detector, namespace.disarm))
    for case in cases:
        results.append(result := suite.run(case, disarmed=disarmed))
        if not namespace.json:
            print(rows(result), flush=True)
    print(as_json(results) if namespace.json else f"\n{tally(results)}", flush=True)
    if all(result.verdict is Verdict.NOT_RUN for result in results):
        raise ScopeError(f"no fault was tried: {results[0].name}: {results[0].notes[0]}")
    return not any(result.verdict.is_failure for result in results)


R = TypeVar("R", TrialResult, NumericResult)


def _run_disarming(
    tried: Iterable[R], table: Callable[[list[R]], str], *, print_json: bool
) -> bool:
    """Show what happens with what finds each fault and without; whether all ended as it must."""
    results = list[R]()
    for result in tried:
        results.append(result)
        if not print_json:
            print(result.progress, file=sys.stderr, flush=True)
    plain = [asdict(result) for result in results]
    print(json.dumps(plain, indent=2) if print_json else table(results), flush=True)
    return all(result.shows_it for result in results)
