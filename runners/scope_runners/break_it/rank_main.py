"""One rank of a run: it streams as any program would, and tells what becomes of it.

Rank0 holds a chunk from the moment it has told of it, so that a restart neither repeats nor loses
one. An error is told on its way out and not caught.
"""

import hashlib
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from scope_rt.config import RuntimeConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Receipt
from scope_rt.control.recompute import RecomputeMode
from scope_rt.session import ScheduledEvent, StreamSession
from scope_runners.break_it.audience import Listener, gather
from scope_runners.break_it.events import EventKind, EventLog, read_events
from scope_runners.break_it.instruments import instruments_from_environment
from scope_runners.break_it.script import RankJob
from scope_runners.guarded import guarded
from scope_runners.watched_rank import EndReport, redirect_output

SEED = 7


def main(argv: Sequence[str]) -> int:
    """Run the job whose file is `argv[0]` as the rank that the environment says."""
    job, config = RankJob.load(Path(argv[0])), RuntimeConfig.from_environment()
    torch.set_num_threads(1)
    redirect_output(job.speech(config.rank, config.attempt))
    log = EventLog(job.events, rank=config.rank, attempt=config.attempt)

    def run() -> int:
        log.tell(EventKind.STARTED)
        with EndReport(partial(_tell_end, log)):
            _stream(job, config, log)
        return 0

    return guarded(run, speaker=f"rank {config.rank}")


def _tell_end(log: EventLog, error: BaseException | None) -> None:
    if error is None:
        log.tell(EventKind.LEFT)
    else:
        log.tell(EventKind.FAILED, error=type(error).__name__, text=str(error))


def _stream(job: RankJob, config: RuntimeConfig, log: EventLog) -> None:
    is_odd = config.rank == job.odd_rank
    log.tell(EventKind.OPENING)
    session = StreamSession(
        job.model,
        plan=job.odd_plan if is_odd and job.odd_plan else job.plan,
        tp=job.odd_tp if is_odd and job.odd_plan else job.tp,
        seed=SEED,
        recompute=RecomputeMode.R0A if job.script.rebuilds else None,
        checkpoint=job.checkpoint,
        resume=config.attempt > 0,
        record=job.recording if job.records else None,
        instruments=instruments_from_environment(),
        config=config,
    )
    with ExitStack() as stack:
        stack.enter_context(session)
        resumed_at = session.resumed_at_chunk
        log.tell(EventKind.READY, chunk=-1 if resumed_at is None else resumed_at)
        if session.is_control_rank:
            taker = _Taker(job, session, log)
            stack.callback(taker.close)
            taker.take_all()
        else:
            for _ in session.stream(job.prompt):
                raise AssertionError("a mesh rank shows no chunk")


class _Taker:
    """Rank0's consumer: holds what it has told of, and asks for what the scenario asks for."""

    def __init__(self, job: RankJob, session: StreamSession, log: EventLog) -> None:
        self._job, self._session, self._log = job, session, log
        told = read_events(job.events)
        self._num_held = sum(event.kind is EventKind.EMITTED for event in told)
        self._cut: Receipt | None = None
        self._listener: Listener = gather(job, session.recipe, log)

    def take_all(self) -> None:
        cues = [
            ScheduledEvent(
                chunk_index=cue.chunk,
                prompt=self._job.prompt if cue.says_again else None,
                hard_cut=cue.hard_cut,
                recompute=cue.recompute,
            )
            for cue in self._job.script.cues
        ]
        chunks = self._session.stream(
            self._job.prompt,
            num_chunks=self._job.script.num_chunks,
            schedule=cues,
            num_held=lambda: self._num_held,
        )
        for chunk in chunks:
            self._take(chunk)
        if self._session.recording_failure is not None:
            self._log.tell(EventKind.NOTED, text=self._session.recording_failure)

    def close(self) -> None:
        self._listener.close()

    def _take(self, chunk: Chunk) -> None:
        effect = None if self._cut is None else self._cut.wait(0.0)
        if effect is not None:
            self._log.tell(EventKind.CUT, chunk=effect.chunk_index, epoch=effect.cache_epoch)
            self._cut = None
        self._listener.hear(chunk)
        sha256 = hashlib.sha256(chunk.latents_sha256.encode() + chunk.frames.tobytes())
        self._log.tell(
            EventKind.EMITTED,
            chunk=chunk.chunk_index,
            epoch=chunk.cache_epoch,
            sha256=sha256.hexdigest(),
        )
        self._num_held += 1
        if chunk.chunk_index == self._job.hard_cut_after:
            self._cut = self._session.hard_cut()
        time.sleep(self._job.pause_s)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
