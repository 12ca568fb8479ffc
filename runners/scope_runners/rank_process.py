"""Ranks are distinguished by the lines they log and by the names of their processes.

Rank0, or a process alone, prints the sentence with which the command ends.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scope_rt.config import RuntimeConfig
from scope_runners import logs
from scope_runners.guarded import guarded

_LOG = logging.getLogger(__name__)


def guarded_rank(run: Callable[[], int]) -> int:
    """Run this process's part of a job and return the exit code, as `guarded` does."""

    def run_as_rank() -> int:
        config = RuntimeConfig.from_environment()
        rank = config.rank
        if config.launched:
            with suppress(OSError):  # there is no /proc
                Path("/proc/self/comm").write_text(f"scope-rank{rank}")
        logs.set_up(source=f"rank{rank}")
        return guarded(run, log=_LOG if rank else None)

    return guarded(run_as_rank)
