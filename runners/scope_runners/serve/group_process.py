"""The launcher of one session: its ranks live and die with it, and it outlives a killed server.

`python -m scope_runners.serve.group_process FOLDER`, started by the server in a session of its own.
"""

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from scope_contracts.errors import LinkError, UserInputError
from scope_rt.config import StreamConfig
from scope_rt.file_lock import open_locked
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.setup_choices import topology_of
from scope_runners import logs
from scope_runners.fork_server import Event, ForkServerEnded, RankEnded, RankStarted
from scope_runners.guarded import guarded
from scope_runners.launcher import Progress, Restarts, chunks_saved, launch_attempts
from scope_runners.rank_group import Attempt
from scope_runners.serve.messages import End, GroupEnded, Message, RankEvent, RankState, Role
from scope_runners.serve.reconnect import Reconnecting
from scope_runners.serve.session_files import SessionFiles
from scope_runners.serve.wire import Connection

RANK_MODULE = "scope_runners.serve.rank"
_LOG = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks of the session in the folder of `argv` until it ends; returns the exit code."""
    (folder,) = sys.argv[1:] if argv is None else argv
    files = SessionFiles(Path(folder))
    return guarded(partial(_run, files))


class _Report:
    """What happened to the ranks, for a server that may come and go."""

    def __init__(self, path: Path, session_id: str) -> None:
        self._lock = threading.Lock()
        self._newest: dict[int, RankEvent] = {}
        self._server = Reconnecting(
            path,
            session_id,
            on_connected=self._tell_all,
            on_message=self._obey,
            on_lost=self._end_group,
            on_failed=lambda error: self._end_group(),
            role=Role.LAUNCHER,
        )
        self.has_to_end = threading.Event()
        """Whether the server asked for the end, or is gone for good."""
        self._server.start()

    def see(self, attempt: int, event: Event) -> None:
        """A rank started or ended."""
        match event:
            case RankStarted(rank, pid):
                told = RankEvent(attempt=attempt, rank=rank, state=RankState.RUNNING, pid=pid)
            case RankEnded(rank, code):
                state = RankState.LOST if code else RankState.ENDED
                with self._lock:
                    pid = self._newest[rank].pid if rank in self._newest else 0
                told = RankEvent(attempt=attempt, rank=rank, state=state, pid=pid, code=code)
            case ForkServerEnded():
                return
        with self._lock:
            self._newest[told.rank] = told
        self._server.send(told)

    def ended(self, code: int) -> None:
        """No rank runs, and none will."""
        self._server.send(GroupEnded(code=code))
        self._server.close()

    def _tell_all(self, connection: Connection) -> None:
        with self._lock:
            newest = list(self._newest.values())
        for event in newest:
            connection.send(event)

    def _obey(self, connection: Connection, message: Message, body: bytearray) -> None:
        if not isinstance(message, End):
            raise LinkError(f"a server does not send {type(message).__name__} to a launcher")
        self._end_group()

    def _end_group(self) -> None:
        """As if a person asked for it: rank0 ends the stream in order."""
        self.has_to_end.set()
        os.kill(os.getpid(), signal.SIGTERM)


def _run(files: SessionFiles) -> int:
    job = files.read_job()
    logs.set_up(source="launcher", stream=job.session_id)
    try:
        lock = open_locked(files.launcher_lock)  # until this process ends
    except BlockingIOError:
        raise UserInputError(f"the session in {files.folder} has a launcher already") from None
    config = StreamConfig.of(**job.settings)
    world_size = topology_of(config, LaunchEnvironment()).world_size
    attempt = Attempt(argv=[str(files.folder)], num_ranks=world_size)
    progress = Progress(partial(chunks_saved, files.snapshot))
    report = _Report(job.socket, job.session_id)
    while True:
        code = launch_attempts(
            RANK_MODULE,
            lambda _: attempt,
            threads=job.threads,
            restarts=Restarts(most=config.recovery.max_restarts, made_progress=progress.has_risen),
            on_event=report.see,
            heartbeat_timeout_s=config.mesh.heartbeat_timeout_s,
            chunk_timeout_s=config.mesh.group_timeout_s,
        )
        if code or files.rewind() is None or report.has_to_end.is_set():
            break  # who serves the session next rewinds it
        _LOG.info("the ranks start again, to rewind the stream")
    report.ended(code)
    os.close(lock)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
