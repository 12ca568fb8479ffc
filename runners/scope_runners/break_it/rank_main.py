"""One rank of a run: it streams as any program would, and logs what happens to it.

Rank0 acknowledges a chunk once it is in the log, so that a restart neither repeats nor loses one.
An error is logged on its way out, and not caught.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from scope_contracts.errors import ScopeError
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Receipt
from scope_rt.control.recompute import RecomputeMode
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.session import StreamSession
from scope_rt.watchdog import Watchdog
from scope_runners.break_it.consumer import ChunkConsumer, open_consumer
from scope_runners.break_it.events import EventKind, EventLog, read_events
from scope_runners.break_it.instruments import instruments_from_environment
from scope_runners.break_it.job import RankJob
from scope_runners.guarded import end_stuck, guarded
from scope_runners.parts import register_parts
from scope_runners.watched_rank import EndReport, redirect_output

SEED = 7


def main(argv: Sequence[str]) -> int:
    """Run the job whose file is `argv[0]` as the rank that the environment says."""
    job, environment = RankJob.load(Path(argv[0])), LaunchEnvironment.from_environment()
    torch.set_num_threads(1)
    redirect_output(job.output(environment.rank, environment.attempt))
    log = EventLog(job.events, rank=environment.rank, attempt=environment.attempt)

    def run() -> int:
        log.write(EventKind.STARTED)
        with EndReport(partial(_log_end, log)):
            _stream(job, environment, log)
        return 0

    return guarded(run, speaker=f"rank {environment.rank}")


def _end_stuck(log: EventLog) -> Callable[[ScopeError], NoReturn]:
    def end(error: ScopeError) -> NoReturn:
        _log_end(log, error)
        end_stuck(error)

    return end


def _log_end(log: EventLog, error: BaseException | None) -> None:
    if error is None:
        log.write(EventKind.LEFT)
    else:
        log.write(EventKind.FAILED, error=type(error).__name__, text=str(error))


def _stream(job: RankJob, environment: LaunchEnvironment, log: EventLog) -> None:
    differs = environment.rank == job.differing_rank and bool(job.differing_plan)
    log.write(EventKind.OPENING)
    register_parts(job.parts)
    config = StreamConfig.load(
        model=job.model,
        recipe=job.family,
        plan=job.differing_plan if differs else job.plan,
        tp=job.differing_tp if differs else job.tp,
        seed=SEED,
        kv_cache=job.script.kv_cache,
        image=job.image if job.script.has_start_frame else None,
        recompute=RecomputeMode.R0A if job.script.recomputes_always else None,
        log=job.recording,
        record_latents=job.records,
        snapshot=job.snapshot,
        resume=environment.attempt > 0,
    )
    instruments = replace(instruments_from_environment(), watchdog=Watchdog(_end_stuck(log)))
    session = StreamSession(config, instruments=instruments)
    with ExitStack() as stack:
        stack.enter_context(session)
        resumed_at = session.resumed_at_chunk
        log.write(EventKind.READY, chunk=-1 if resumed_at is None else resumed_at)
        if session.is_control_rank:
            rank0 = _Rank0(job, session, log)
            stack.callback(rank0.close)
            rank0.stream()
        else:
            for _ in session.stream(job.prompt):
                raise AssertionError("a mesh rank emits no chunk")


class _Rank0:
    """Rank0's consumer: acknowledges what it has logged, and steers the stream as the job says."""

    def __init__(self, job: RankJob, session: StreamSession, log: EventLog) -> None:
        self._job, self._session, self._log = job, session, log
        logged = read_events(job.events)
        emitted = {event.chunk for event in logged if event.kind is EventKind.EMITTED}
        first = session.resumed_at_chunk
        # What was retracted is made again.
        self._num_acknowledged = sum(first is None or chunk < first for chunk in emitted)
        self._cut: Receipt | None = None
        self._consumer: ChunkConsumer = open_consumer(job, session.setup.recipe, log)

    def stream(self) -> None:
        events = [
            ScheduledEvent(
                chunk_index=event.chunk,
                prompt=self._job.prompt if event.repeats_prompt else None,
                hard_cut=event.hard_cut,
                recompute=event.recompute,
            )
            for event in self._job.script.events
        ]
        chunks = self._session.stream(
            self._job.prompt,
            num_chunks=self._job.script.num_chunks,
            schedule=events,
            acknowledged=lambda: self._num_acknowledged,
        )
        for chunk in chunks:
            self._take(chunk)
        if self._session.log.failure is not None:
            self._log.write(EventKind.NOTED, text=self._session.log.failure)

    def close(self) -> None:
        self._consumer.close()

    def _take(self, chunk: Chunk) -> None:
        effect = None if self._cut is None else self._cut.wait(0.0)
        if effect is not None:
            self._log.write(EventKind.CUT, chunk=effect.chunk_index, epoch=effect.cache_epoch)
            self._cut = None
        self._consumer.take(chunk)
        sha256 = hashlib.sha256(chunk.latents_sha256.encode() + chunk.frames.tobytes())
        self._log.write(
            EventKind.EMITTED,
            chunk=chunk.chunk_index,
            epoch=chunk.cache_epoch,
            sha256=sha256.hexdigest(),
        )
        self._num_acknowledged += 1
        self._job.image.unlink(missing_ok=True)
        if chunk.chunk_index == self._job.hard_cut_after:
            self._cut = self._session.hard_cut()
        time.sleep(self._job.pause_s)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
