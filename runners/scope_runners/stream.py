"""`scope-rt stream`: one request, one video; rank0 alone speaks, and what is left is whole files.

`python -m scope_runners.stream` under torchrun is one rank of the same job; started by itself it
launches the ranks it needs.
"""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from scope_contracts.errors import UserInputError
from scope_rt.config import RuntimeConfig
from scope_rt.instruments import Instruments
from scope_rt.mesh.topology import Topology
from scope_rt.record.snapshot import num_chunks_saved, run_that_saved
from scope_rt.session import StreamSession
from scope_rt.trace import TraceRecorder
from scope_runners.job import (
    OutputFiles,
    StreamJob,
    available_cores,
    check_machine,
    check_outputs,
    degree_of,
    prepare,
)
from scope_runners.launcher import Progress, Restarts, launch_attempts
from scope_runners.leftovers import check_nothing_is_lost, say_how_to_go_on
from scope_runners.rank_group import Attempt
from scope_runners.rank_process import guarded_rank
from scope_runners.request import StreamRequest, parse_stream_request
from scope_runners.show import control
from scope_runners.stop_request import leave_at_once, taking_stop_signals

RANK_MODULE = "scope_runners.stream"


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
    started_s = time.perf_counter()
    instruments = instruments or Instruments()
    config = RuntimeConfig.from_environment()
    # A launched rank's way to end tells its launcher whether to start it again.
    with nullcontext() if config.launched else taking_stop_signals(leave_at_once):
        job = prepare(request, config)
    if config.launched or job.topology.world_size == 1:
        torch.set_num_threads(request.threads)
        if not 0 <= config.rank < config.world_size:
            raise UserInputError(
                f"RANK is {config.rank} of {config.world_size} processes; unset RANK, or start all "
                "ranks with torchrun"
            )
        if not config.launched:
            check_nothing_is_lost(job, check_outputs(job), goes_on=request.resume)
        if request.trace is not None:
            instruments = replace(instruments, trace=TraceRecorder(config.rank))
        if config.rank == 0:
            return _control(job, config, instruments, started_s)
        return _serve(job, config, instruments)
    check_machine(job, num_cores=available_cores(), num_gpus=torch.cuda.device_count())
    files = check_outputs(job)
    check_nothing_is_lost(job, files, goes_on=request.resume)
    # Until a rank0 saves its own, the file may be of an earlier stream.
    earlier = None if request.resume else run_that_saved(files.checkpoint)
    progress = Progress(lambda: num_chunks_saved(files.checkpoint, unless_by=earlier))

    def attempt_of(number: int) -> Attempt:
        topology = Topology(plan_id=request.plan, tp_degree=degree_of(request, number))
        return Attempt(argv=argv, num_ranks=topology.world_size)

    code = launch_attempts(
        rank_module,
        attempt_of,
        threads=request.threads,
        restarts=Restarts(most=request.max_restarts, made_progress=progress.has_risen),
    )
    if code > 128 and num_chunks_saved(files.checkpoint, unless_by=earlier):
        say_how_to_go_on(files)
    return code


def _session(
    job: StreamJob,
    config: RuntimeConfig,
    instruments: Instruments,
    files: OutputFiles | None = None,
) -> StreamSession:
    request = job.request
    return StreamSession(
        request.model,
        plan=request.plan,
        tp=job.topology.tp_degree,
        seed=request.seed,
        height=job.height,
        width=job.width,
        kv_cache_attention_bias=request.kv_cache_attention_bias,
        kv_cache=request.kv_cache,
        recompute=request.recompute,
        instruments=instruments,
        checkpoint=None if files is None else files.checkpoint,
        resume=True if request.resume else None,
        record=request.record,
        config=config,
    )


def _control(
    job: StreamJob, config: RuntimeConfig, instruments: Instruments, started_s: float
) -> int:
    """Rank0: steer the ranks and show what they make."""
    files = check_outputs(job)
    session = _session(job, config, instruments, files)
    return control(job, config, session, files, started_s=started_s)


def _serve(job: StreamJob, config: RuntimeConfig, instruments: Instruments) -> int:
    """A mesh rank: generate for rank0 until it ends the stream, also when a person ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _session(job, config, instruments) as session:
        for _ in session.stream(job.request.prompt):
            raise AssertionError("a mesh rank shows no chunk")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
