"""A soak ends with a verdict, also one that was interrupted and resumed.

A stream is taken at the pace of a player while its ranks are killed, stopped, delayed and broken
inside, and while it is cut and prompted live. Then all of it is replayed, and what was shown,
acknowledged, recorded and left behind is compared with what the runtime promises.
"""

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from scope_contracts.envelope import PlanId
from scope_lab.fresh_folder import fresh_folder
from scope_lab.replay_process import replayed
from scope_lab.soak.event_log import EventLog, acknowledged
from scope_lab.soak.fault_injector import FaultInjector
from scope_lab.soak.job import HEARTBEAT_S, SoakJob
from scope_lab.soak.report import report, table
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.topology import RUNNABLE
from scope_runners.arguments import one_of, positive, positive_number, seed
from scope_runners.command_parser import CommandParser
from scope_runners.exit_codes import FAILED
from scope_runners.launcher import Progress, Restarts, chunks_saved, launch_attempts
from scope_runners.rank_group import Attempt

MOST_FRUITLESS = 8
"""How many starts in a row may show no new chunk."""
START_S = 30.0
"""How long ranks wait for each other to come: one may be stopped while it starts."""
_MARK = "SOAK_FOLDER"
"""All processes of a soak have its folder in this variable."""
_LEAVE_S = 20.0
_REPLAY_S, _SLOWEST = 300.0, 4
"""A replay may take this long, and so many times as long as its video."""


def main(argv: Sequence[str]) -> int:
    """Exit 0 when nothing was lost, 1 when something was, 2 for wrong arguments."""
    args = _parser().parse_args(argv)
    folder: Path = args.out.absolute()
    job = SoakJob.load(folder) if args.resume else _new_job(args, folder)
    with job.claim():
        return _judged(job, args)


def _judged(job: SoakJob, args: argparse.Namespace) -> int:
    folder = Path(job.folder)
    os.environ[_MARK] = job.folder
    for pid in _processes_of(folder, within_s=_LEAVE_S):  # such as ranks that were left stopped
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code = _soak(job)
    left = _processes_of(folder, within_s=_LEAVE_S)
    if code > 128:
        print(f"soak: interrupted; resume it with --resume --out {args.out}", file=sys.stderr)
        return code
    again = replayed(
        job.recording,
        plan=job.plan,
        tp=job.tp,
        log=job.rank_output,
        timeout_s=_REPLAY_S + _SLOWEST * job.num_chunks * job.chunk_s,
    )
    outcome = report(job, code=code, left_behind=left, replayed=again)
    job.path("report.json").write_text(outcome.to_json())
    print(outcome.to_json() if args.json else table(outcome), flush=True)
    return 0 if outcome.passed else FAILED


def _new_job(args: argparse.Namespace, folder: Path) -> SoakJob:
    model = ModelFolder.open(args.model)
    chunk_s = model.codec().temporal_stride * model.recipe.frames_per_block / model.recipe.fps
    job = SoakJob(
        folder=str(folder),
        model=args.model,
        plan=args.plan,
        tp=args.tp,
        seed=args.seed,
        num_chunks=math.ceil(args.minutes * 60 / chunk_s),
        chunk_s=chunk_s,
        fault_every_s=args.fault_every,
        cue_every_s=args.cue_every,
    )
    model.config.check_degree(job.topology.tp_degree)
    fresh_folder(folder, otherwise=", or add --resume")
    job.save()
    return job


def _soak(job: SoakJob) -> int:
    """Stream to the end; returns the launcher's exit code, which only a person makes one above 128.

    A launcher that the fault injector has ended, or that starts its ranks no more, has failed.
    """
    lines = list(EventLog(job.event_log).read().new())
    first = 1 + max((line.attempt for line in lines), default=-1)
    injector = FaultInjector(job, lines, first_attempt=first)
    began_s = time.monotonic() - len(acknowledged(lines)) * job.chunk_s
    os.environ["SCOPE_HEARTBEAT_TIMEOUT_S"] = str(HEARTBEAT_S)
    os.environ["SCOPE_START_TIMEOUT_S"] = str(START_S)

    is_spent = False

    def attempt_of(number: int) -> Attempt:
        nonlocal is_spent
        is_spent = False
        environ = injector.environ(number)
        return Attempt(
            argv=[job.folder, str(first + number), str(began_s)],
            num_ranks=job.topology.world_size,
            environ_of=lambda rank: environ,
        )

    def made_progress() -> bool:
        """The launcher asks before another attempt; where none follows, the starts are spent."""
        nonlocal is_spent
        is_spent = True
        return progress.has_risen()

    progress = Progress(lambda: chunks_saved(job.snapshot))
    injector.start()
    # For the moment in which the fault injector would end a launcher that has just ended.
    handler = signal.signal(signal.SIGTERM, lambda signum, frame: None)
    try:
        code = launch_attempts(
            "scope_lab.soak.rank_main",
            attempt_of,
            restarts=Restarts(most=MOST_FRUITLESS, made_progress=made_progress),
            on_event=injector.take,
        )
    finally:
        injector.close()
        signal.signal(signal.SIGTERM, handler)
    return FAILED if injector.has_given_up or is_spent else code


def _processes_of(folder: Path, *, within_s: float) -> list[int]:
    """Processes of this soak that are not gone within a time; ranks take a moment to leave."""
    deadline_s = time.monotonic() + within_s
    while (found := _marked(folder)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return found


def _marked(folder: Path) -> list[int]:
    mark, found = f"{_MARK}={folder}\0".encode(), list[int]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environ = path.read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if mark in environ and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="scripts/lab soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=positive_number, default=60.0, help="length of the stream (default 60)")
    add("--plan", type=one_of(RUNNABLE), default=PlanId.PP1, help="(default pp1)")
    add("--tp", type=positive, default=2, help="TP degree (default 2)")
    add("--seed", type=seed, default=0, help="of the stream and of all that happens to it")
    add("--model", default=EMBEDDED, metavar="FOLDER", help="a model folder (default: embedded)")
    add(
        "--fault-every",
        type=positive_number,
        default=30.0,
        metavar="S",
        help="mean seconds (default 30)",
    )
    add(
        "--cue-every",
        type=positive_number,
        default=10.0,
        metavar="S",
        help="mean seconds (default 10)",
    )
    add("--out", type=Path, default=Path("out/soak"), metavar="FOLDER", help="(default out/soak)")
    add("--resume", action="store_true", help="resume the soak that was interrupted in --out")
    add("--json", action="store_true", help="print one JSON object")
    return parser
