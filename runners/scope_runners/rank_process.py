"""Ranks are distinguished by the lines they log and by the names of their processes.

Rank0, or a process alone, prints the sentence with which the command ends.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.watchdog import Watchdog
from scope_runners import logs
from scope_runners.guarded import end_stuck, guarded

_LOG = logging.getLogger(__name__)


def guarded_rank(run: Callable[[], int]) -> int:
    """Run this process's part of a job and return the exit code, as `guarded` does."""

    def run_as_rank() -> int:
        environment = LaunchEnvironment.from_environment()
        rank = environment.rank
        if environment.launched:
            with suppress(OSError):  # there is no /proc
                Path("/proc/self/comm").write_text(f"scope-rank{rank}")
        logs.set_up(source=f"rank{rank}")
        # One rank of each other host speaks for rank0, which is first on its own.
        beside = rank == 0 or environment.local_rank > 0
        return guarded(run, log=_LOG if rank else None, is_beside_rank0=beside)

    return guarded(run_as_rank)


def rank_watchdog() -> Watchdog:
    """Of a process that is this rank and nothing else: where it is stuck, it is ended by name."""
    log = _LOG if LaunchEnvironment.from_environment().rank else None
    return Watchdog(partial(end_stuck, log=log))
