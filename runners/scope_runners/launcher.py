"""The ranks of one machine live and die together, and none outlives its launcher.

A rank that dies ends its attempt, and all ranks start again while that brings the work forward.
The launcher hosts the store in which the ranks meet, so that the store survives any of them. Ranks
sit in sessions of their own: a terminal's Ctrl-C reaches the launcher alone, which hands it to
rank0 to end the stream in order.
"""

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scope_rt.config import MeshConfig
from scope_rt.environment_names import RESTARTS_AFTER_PROGRESS, SECRET, SECRET_FILE
from scope_rt.mesh.meeting_point import host_store
from scope_rt.record.snapshot import look
from scope_rt.stream_secret import new_secret_file
from scope_runners import logs
from scope_runners.fork_server import Event
from scope_runners.rank_group import Attempt, Failure, RankGroup
from scope_runners.stop_request import taking_stop_signals


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often a group that lost a rank is started again."""

    most: int = 0
    """How many starts in a row may bring the work no further."""
    made_progress: Callable[[], bool] | None = None
    """Whether the work came further since the last call; where None, starts alone are counted."""

    @property
    def follow_progress(self) -> bool:
        """Whether another start follows every one that brought the work further."""
        return self.most > 0 and self.made_progress is not None


NO_RESTARTS = Restarts()
_LOG = logging.getLogger(__name__)


def chunks_saved(snapshot: Path, *, but_of: str | None = None) -> int:
    """How far the stream of a snapshot is; 0 where there is none, or that of the run `but_of`."""
    header = look(snapshot)
    return 0 if header is None or header.run_id == but_of else header.next_chunk_index


class Progress:
    """Tells whether a count rose above all it has been, which is `most` or what it is now."""

    def __init__(self, count: Callable[[], int], *, most: int = 0) -> None:
        self._count = count
        self._most = max(most, count())

    def has_risen(self) -> bool:
        """Since the last call, or since this object was made."""
        before, self._most = self._most, max(self._most, self._count())
        return self._most > before


def launch(
    module: str,
    argv: Sequence[str],
    *,
    num_ranks: int,
    threads: int = 1,
    restarts: Restarts = NO_RESTARTS,
) -> int:
    """Run `module.main(argv)` as `num_ranks` ranks; see `launch_attempts`."""
    attempt = Attempt(argv=argv, num_ranks=num_ranks)
    return launch_attempts(module, lambda _: attempt, threads=threads, restarts=restarts)


def launch_attempts(
    module: str,
    attempt_of: Callable[[int], Attempt],
    *,
    threads: int = 1,
    restarts: Restarts = NO_RESTARTS,
    on_event: Callable[[int, Event], None] = lambda attempt, event: None,
    heartbeat_timeout_s: float = MeshConfig().heartbeat_timeout_s,
    chunk_timeout_s: float = 0.0,
) -> int:
    """Run `module.main` as the ranks of `attempt_of(0)`; when one fails, of `attempt_of(1)`, ...

    A rank that could not use its input, or that was asked to end, is not tried again.
    Ranks know each other by a secret that only they can read, made for these attempts alone. They
    find the number of their attempt in `TORCHELASTIC_RESTART_COUNT`; below
    `TORCHELASTIC_MAX_RESTARTS`, another one follows in any case, and where
    `SCOPE_RESTARTS_AFTER_PROGRESS` is 1, also after progress in this one. Where a start ends by an
    error of integrity, as the one before, and has brought the work no further, none follows: the
    cause is no fault of a moment. Ranks of a start after such an error find
    `SCOPE_AFTER_INTEGRITY_ERROR` = 1, or "unsaid" where rank0 may not have retracted anything,
    which holds until a start has brought the work further.
    `on_event` is called with the number of the attempt and which rank started or ended.
    Where all ranks are stopped (SIGSTOP), none is left to name another: they are named and ended
    here, within `heartbeat_timeout_s`. A person's first signal leaves rank0 `chunk_timeout_s` for
    what it is at, and 15 s for its end.

    Returns the exit code of the last attempt's first failing rank; one that a signal ended counts
    as 128 + signal, as in a shell; one that was ended because a person asked for it, as 128 + the
    signal of that person.
    """
    logs.set_up(source="launcher")
    store = host_store()
    inherited = {name: value for name, value in os.environ.items() if name != SECRET}
    environ = {
        # One thread, so that forking is safe; and no stack traces for connections that end.
        "OPENBLAS_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **inherited,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),  # known without asking the store
        RESTARTS_AFTER_PROGRESS: "1" if restarts.follow_progress else "0",
        "OMP_NUM_THREADS": str(threads),
    }
    with new_secret_file() as secret:
        environ[SECRET_FILE] = str(secret)
        group = RankGroup(
            module,
            environ,
            on_event,
            heartbeat_timeout_s=heartbeat_timeout_s,
            chunk_timeout_s=chunk_timeout_s,
        )
        return _run_all(group, attempt_of, restarts)


def _run_all(group: RankGroup, attempt_of: Callable[[int], Attempt], restarts: Restarts) -> int:
    with taking_stop_signals(group.ask_to_stop):
        try:
            return _repeat(group, attempt_of, restarts)
        finally:
            group.close()


def _repeat(group: RankGroup, attempt_of: Callable[[int], Attempt], restarts: Restarts) -> int:
    number = fruitless = 0
    before: Failure | None = None
    while True:
        left = restarts.most - fruitless
        attempt = attempt_of(number)
        failure = group.run(number, attempt, restarts_left=left, before=before)
        if failure is None:
            return 0
        if failure.is_final or not restarts.most:
            return failure.code
        came_further = restarts.made_progress is not None and restarts.made_progress()
        if failure.is_wrong and before is not None and before.is_wrong and not came_further:
            _LOG.error("%s, as the start before; no start brings the stream further", failure)
            return failure.code
        if before is not None and before.is_unsaid and not came_further:
            failure = replace(failure, is_wrong=True, is_unsaid=True)  # it may still be unsaid
        before = failure
        fruitless = 1 if came_further else fruitless + 1
        if fruitless > restarts.most:
            _LOG.error("%s; %d starts brought the stream no further", failure, restarts.most)
            return failure.code
        _LOG.warning("%s; starting again (%d of %d)", failure, fruitless, restarts.most)
        number += 1
