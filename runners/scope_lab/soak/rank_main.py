"""One rank of a soak: it streams and writes as any program would, and keeps an event log.

Rank0 takes chunks at the pace of a player, and sends the cues of the schedule until chunks show
them.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scope_lab.soak.event_log import (
    AttemptLog,
    Complaint,
    EventLog,
    Failed,
    Opened,
    Shown,
    Started,
    acknowledged,
)
from scope_lab.soak.job import SoakJob
from scope_lab.soak.steering import Steering
from scope_lab.soak.video import thumbnail
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.session import StreamSession
from scope_rt.video.writer import VideoWriter
from scope_runners.break_it.instruments import instruments_from_environment
from scope_runners.guarded import guarded
from scope_runners.watched_rank import EndReport, redirect_output


def main(argv: Sequence[str]) -> int:
    """Run the soak of folder `argv[0]` as attempt `argv[1]`; the first chunk is due at `argv[2]`
    of the monotonic clock."""
    job, rank = SoakJob.load(Path(argv[0])), LaunchEnvironment.from_environment().rank
    torch.set_num_threads(1)
    redirect_output(job.rank_output)
    log = AttemptLog(EventLog(job.event_log), attempt=int(argv[1]))

    def run() -> int:
        log.write(Started, rank=rank, pid=os.getpid())
        with EndReport(partial(_report_error, log, rank)):
            _stream(job, log, began_s=float(argv[2]))
        return 0

    return guarded(run, speaker=f"attempt {log.attempt} rank {rank}")


def _report_error(log: AttemptLog, rank: int, error: BaseException | None) -> None:
    if error is not None:
        log.write(Failed, rank=rank, error=type(error).__name__, text=str(error))


def _stream(job: SoakJob, log: AttemptLog, *, began_s: float) -> None:
    config = StreamConfig.load(
        model=job.model,
        plan=job.plan,
        tp=job.tp,
        seed=job.seed,
        snapshot=job.snapshot,
        resume=log.attempt > 0,
        log=job.recording,
        record_latents=True,
    )
    with StreamSession(config, instruments=instruments_from_environment()) as session:
        if session.is_control_rank:
            _consume(job, session, log, began_s=began_s)
        else:
            for _ in session.stream(job.schedule.first_prompt):
                raise AssertionError("a mesh rank shows no chunk")


def _consume(job: SoakJob, session: StreamSession, log: AttemptLog, *, began_s: float) -> None:
    """Show, write and steer the stream to its end."""
    resumed_at, recipe = session.resumed_at_chunk, session.setup.recipe
    writer = VideoWriter(
        job.video,
        width=recipe.default_width,
        height=recipe.default_height,
        fps=recipe.fps,
        ledger=session.log,
        earlier=session.earlier_video(),
        keep_on_error=True,
    )
    with writer:
        log.write(
            Opened,
            num_acknowledged=writer.earlier_chunks,
            resumed_at_chunk=-1 if resumed_at is None else resumed_at,
        )
        lines = list(EventLog(job.event_log).read().new())
        number, steering = (
            len(acknowledged(lines)),
            Steering(job.schedule.cues, session, log, lines),
        )
        chunks = session.stream(
            job.schedule.first_prompt,
            num_chunks=job.num_chunks,
            acknowledged=lambda: writer.durable_chunks,
        )
        for chunk in chunks:
            log.write(Shown, number=number, **_chunk_fields(chunk))
            steering.check(chunk)
            writer.write(chunk.frames, chunk_index=chunk.chunk_index)
            number += 1
            steering.send(number)
            time.sleep(max(0.0, began_s + number * job.chunk_s - time.monotonic()))
    if session.log.failure is not None:
        log.write(Complaint, text=session.log.failure)


def _chunk_fields(chunk: Chunk) -> dict[str, Any]:
    """What the event log keeps of a chunk."""
    return {
        "chunk_index": chunk.chunk_index,
        "cache_epoch": chunk.cache_epoch,
        "prompt": chunk.prompt,
        "latents_sha256": chunk.latents_sha256,
        "frames_sha256": hashlib.sha256(chunk.frames.tobytes()).hexdigest(),
        "num_frames": len(chunk.frames),
        "thumbnail": thumbnail(chunk.frames[len(chunk.frames) // 2]).tobytes().hex(),
    }
