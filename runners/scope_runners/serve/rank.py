"""One rank of a session: rank0 streams to the server at the pace it is given, the others serve it.

`python -m scope_runners.serve.rank FOLDER`, started by the session's launcher.
"""

import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from scope_contracts.errors import IntegrityError, ScopeError, UserInputError
from scope_rt.config import StreamConfig
from scope_rt.control.inbox import Receipt
from scope_rt.control.steering import Steering
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.instruments import Instruments
from scope_rt.record.snapshot import look
from scope_rt.rewound import RewoundStream
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_rt.vae.codec import num_frames
from scope_runners import logs
from scope_runners.rank_process import guarded_rank, rank_watchdog
from scope_runners.serve.messages import (
    Applied,
    Command,
    CommandKind,
    Failed,
    RankReady,
    Retracted,
)
from scope_runners.serve.server_link import ServerLink
from scope_runners.serve.session_files import SessionFiles, StreamJob
from scope_runners.stop_request import taking_stop_signals

_WELCOME_S = 60.0
_LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank's part of the session in the folder of `argv`; returns the exit code."""
    (folder,) = sys.argv[1:] if argv is None else argv
    return guarded_rank(partial(_run, SessionFiles(Path(folder))))


def _run(files: SessionFiles) -> int:
    job = files.read_job()
    logs.set_up(stream=job.session_id)
    torch.set_num_threads(job.threads)
    setup = StreamSetup.of(_config(files, job))
    instruments = Instruments(watchdog=rank_watchdog())
    if setup.environment.rank == 0:
        return _control(files, job, setup, instruments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StreamSession(setup, instruments=instruments) as session:
        for _ in session.stream(job.prompt):
            raise AssertionError("a mesh rank shows no chunk")
    return 0


def _config(files: SessionFiles, job: StreamJob) -> StreamConfig:
    is_saved = look(files.snapshot) is not None
    return StreamConfig.of(**job.settings).with_settings(
        log=files.log, snapshot=files.snapshot, record_latents=job.keeps_latents, resume=is_saved
    )


def _control(
    files: SessionFiles, job: StreamJob, setup: StreamSetup, instruments: Instruments
) -> int:
    link: ServerLink | None = None

    def steer(command: Command) -> Receipt:
        return session.steer(_steering(command, resting_bias=setup.kv_cache_attention_bias))

    def rewind(command: Command) -> None:
        files.ask_for_rewind(command.chunk_index, command_id=command.command_id)

    link = ServerLink(job.socket, job.session_id, steer=steer, rewind=rewind)
    with taking_stop_signals(lambda signum, frame: link.end()), ExitStack() as at_end:
        at_end.callback(link.close)
        try:
            session = _session(files, setup, instruments, link)
            with session:
                _stream(files, job, session, link)
        except ScopeError as error:
            if isinstance(error, IntegrityError) and error.retraction is not None:
                link.say(Retracted(retraction=error.retraction))
            link.say(Failed(sentence=str(error)))
            raise
    return 0


def _session(
    files: SessionFiles, setup: StreamSetup, instruments: Instruments, link: ServerLink
) -> StreamSession:
    """The session, rewound where that was asked for and can be done; else whoever asked is told,
    and the stream goes on. A fork that cannot be rewound has nothing to go on with."""
    asked = files.rewind()
    if asked is None:
        return StreamSession(setup, instruments=instruments)
    try:
        # Before the other ranks are met: what rank0 refuses later ends them all.
        RewoundStream(setup, files.log, instruments).check(asked.chunk_index)
    except UserInputError as error:
        if not asked.command_id:
            raise
        _LOG.error("the stream is not rewound to chunk %d: %s", asked.chunk_index, error)
        link.refuse(asked.command_id, str(error))
        files.rewound()
        return StreamSession(setup, instruments=instruments)
    return StreamSession(setup, instruments=instruments, rewind_to=asked.chunk_index)


def _stream(files: SessionFiles, job: StreamJob, session: StreamSession, link: ServerLink) -> None:
    chunks = session.stream(
        job.prompt, acknowledged=lambda: link.num_taken, pace=link, video_input=link
    )
    files.rewound()  # what was asked for is in the log now
    link.open(_ready(session), timeout_s=_WELCOME_S)
    window, epoch, num_latents = session.setup.cache_spec.window_frames, -1, 0
    for chunk in chunks:
        is_later = chunk.cache_epoch == epoch
        epoch, num_latents = chunk.cache_epoch, num_latents * is_later + len(chunk.latents)
        link.give(chunk, cache_fill=min(1.0, num_latents / window))
    link.check()


def _ready(session: StreamSession) -> RankReady:
    setup = session.setup
    chunk_frames = num_frames(setup.codec_sizes, setup.recipe.frames_per_block, starts_epoch=False)
    return RankReady(
        attempt=setup.environment.attempt,
        fps=setup.recipe.fps,
        height=setup.height,
        width=setup.width,
        plan=str(setup.topology.plan_id),
        tp=setup.topology.tp_degree,
        world_size=setup.topology.world_size,
        max_in_flight=setup.topology.max_in_flight,
        chunk_frames=chunk_frames,
        cache_bytes=setup.cache_spec.num_bytes(setup.topology.tp_degree),
        next_chunk=session.resumed_at_chunk or 0,
        resumed=session.resumed is not None,
        broken_on_purpose=session.broken_on_purpose,
        resting_bias=setup.kv_cache_attention_bias,
        prompt_words=setup.model.prompt_words,
        applied=tuple(
            Applied(command_id=name, chunk_index=each.chunk_index, cache_epoch=each.cache_epoch)
            for name, each in session.applied.items()
        ),
        retractions=session.retractions,
    )


def _steering(command: Command, *, resting_bias: float) -> Steering:
    """Raises `UserInputError`: a value cannot be used."""
    transition = None
    if command.transition_chunks:
        transition = TransitionSpec(
            num_chunks=command.transition_chunks,
            method=Interpolation(command.transition_method),
            bias_floor=command.bias or resting_bias,
        )
    is_prompt = command.kind is CommandKind.PROMPT
    return Steering(
        prompt=command.text if is_prompt else None,
        transition=transition,
        hard_cut=command.hard_cut or command.kind is CommandKind.HARD_CUT,
        bias=command.bias if command.kind is CommandKind.BIAS else None,
        seed=command.seed if command.kind is CommandKind.SEED else None,
        command_id=command.command_id,
    )


if __name__ == "__main__":
    raise SystemExit(main())
