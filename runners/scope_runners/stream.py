"""`scope-rt stream`: one request, one video; rank0 alone speaks, and what is left is whole files.

`python -m scope_runners.stream` under torchrun is one rank of the same job; started by itself it
launches the ranks it needs.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from scope_contracts.errors import UserInputError
from scope_rt.environment_names import BREAK_IT_VARIABLES
from scope_rt.instruments import Instruments
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.record.snapshot import look
from scope_rt.session import StreamSession
from scope_rt.setup_choices import topology_of
from scope_rt.trace import TraceRecorder
from scope_runners import logs
from scope_runners.file_limit import check_file_limit
from scope_runners.fork_server import Event, RankEnded
from scope_runners.job import (
    StreamJob,
    available_cores,
    check_machine,
    prepare,
)
from scope_runners.launcher import Progress, Restarts, chunks_saved, launch_attempts
from scope_runners.leftovers import (
    check_nothing_is_lost,
    check_record_is_new,
    say_how_to_resume,
)
from scope_runners.outputs import folders_of_outputs
from scope_runners.rank_group import Attempt
from scope_runners.rank_process import guarded_rank, rank_watchdog
from scope_runners.request import StreamRequest, parse_stream_request
from scope_runners.show import control
from scope_runners.stop_request import STOPPING, interrupt, leave_at_once, taking_stop_signals

RANK_MODULE = "scope_runners.stream"
_LOG = logging.getLogger(__name__)


def main(
    argv: Sequence[str] | None = None,
    *,
    instruments_of: Callable[[], Instruments] = Instruments,
    rank_module: str = RANK_MODULE,
) -> int:
    """Run the job of `argv` and return the exit code; a mesh rank's errors carry its number.

    `instruments_of` makes what this rank runs with; `rank_module` is the module whose `main`, with
    the same arguments, is started as each rank where this process is none.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    return guarded_rank(
        lambda: run_here_or_launch(
            parse_stream_request(arguments),
            arguments,
            instruments=instruments_of(),
            rank_module=rank_module,
        )
    )


def run_here_or_launch(
    request: StreamRequest,
    argv: Sequence[str],
    *,
    instruments: Instruments | None = None,
    rank_module: str = RANK_MODULE,
) -> int:
    """Run this process's part of `request`, or start the processes it needs with `argv`."""
    logs.set_up(stream=request.out.name)
    started_s = time.perf_counter()
    instruments = instruments or Instruments()
    environment = LaunchEnvironment.from_environment()
    unheeded = [name for name in BREAK_IT_VARIABLES if os.environ.get(name)]
    if unheeded and not (environment.launched or instruments.broken_on_purpose):
        _LOG.warning("%s: only ranks of scope-rt break-it heed it; unset it", ", ".join(unheeded))
    # A launched rank's way to end tells its launcher whether to start it again.
    with nullcontext() if environment.launched else taking_stop_signals(leave_at_once):
        job = prepare(request, environment)
    check_file_limit(job.setup.topology.world_size)
    if environment.launched or job.setup.topology.world_size == 1:
        return _run_rank(job, instruments, started_s)
    return _launch(job, argv, rank_module)


def _run_rank(job: StreamJob, instruments: Instruments, started_s: float) -> int:
    request, environment = job.request, job.setup.environment
    torch.set_num_threads(request.threads)
    if not 0 <= environment.rank < environment.world_size:
        raise UserInputError(
            f"RANK is {environment.rank} of {environment.world_size} processes; unset RANK, or "
            "start all ranks with torchrun"
        )
    with folders_of_outputs(job) if environment.rank == 0 else nullcontext():
        return _run_checked(job, instruments, started_s)


def _run_checked(job: StreamJob, instruments: Instruments, started_s: float) -> int:
    request, environment = job.request, job.setup.environment
    if not environment.launched:
        check_nothing_is_lost(job, resumes=request.resume)
    instruments = replace(instruments, watchdog=rank_watchdog())
    if request.trace is not None:
        instruments = replace(instruments, trace=TraceRecorder(environment.rank))
    if environment.rank == 0:
        _LOG.info("settings: %s", job.setup.config.in_effect())
        # `control` looks at what an earlier stream left, and knows more of it than the session.
        with nullcontext() if environment.launched else taking_stop_signals(interrupt):
            session = StreamSession(
                job.setup,
                instruments=instruments,
                check_replaced=lambda: check_record_is_new(job),
            )
        return control(job, session, started_s=started_s)
    return _serve(job, instruments)


def _launch(job: StreamJob, argv: Sequence[str], rank_module: str) -> int:
    """Start the ranks on this machine, and again while that brings the stream further."""
    check_machine(job, num_cores=available_cores(), num_gpus=torch.cuda.device_count())
    with folders_of_outputs(job):
        return _launch_checked(job, argv, rank_module)


def _launch_checked(job: StreamJob, argv: Sequence[str], rank_module: str) -> int:
    request, files, setup = job.request, job.files, job.setup
    check_nothing_is_lost(job, resumes=request.resume)
    setup.release_parts()  # they have checked the request, and rank0 loads its own
    # Until a rank0 saves its own, the snapshot may be of an earlier stream.
    earlier = None if request.resume else look(files.snapshot)

    earlier_run = None if earlier is None else earlier.run_id

    def num_chunks_saved() -> int:
        return chunks_saved(files.snapshot, but_of=earlier_run)

    progress, told = Progress(num_chunks_saved), Progress(lambda: _written_ns(files.summary))

    rank0_code = 0

    def see(_: int, event: Event) -> None:
        nonlocal rank0_code
        if isinstance(event, RankEnded) and event.rank == 0:
            rank0_code = event.code

    def attempt_of(number: int) -> Attempt:
        environment = replace(setup.environment, attempt=number)
        return Attempt(argv=argv, num_ranks=topology_of(setup.config, environment).world_size)

    code = launch_attempts(
        rank_module,
        attempt_of,
        threads=request.threads,
        restarts=Restarts(
            most=setup.config.recovery.max_restarts, made_progress=progress.has_risen
        ),
        on_event=see,
        heartbeat_timeout_s=setup.config.mesh.heartbeat_timeout_s,
        chunk_timeout_s=setup.config.mesh.group_timeout_s,
    )
    if rank0_code < 0 and code - 128 in STOPPING:
        print("scope-rt: interrupted", file=sys.stderr)  # rank0 could not say it
    if code > 128 and num_chunks_saved() and not told.has_risen():
        say_how_to_resume(job)  # rank0 could not
    return code


def _written_ns(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def _serve(job: StreamJob, instruments: Instruments) -> int:
    """A mesh rank: generate for rank0 until it ends the stream, also when a person ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StreamSession(job.setup, instruments=instruments) as session:
        for _ in session.stream(job.request.prompt):
            raise AssertionError("a mesh rank shows no chunk")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
