"""A rank can be told from the others: by the number its errors carry, and by its process's name.

Rank0, or a process alone, speaks for the command.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scope_rt.config import RuntimeConfig
from scope_runners.guarded import guarded


def guarded_rank(run: Callable[[], int]) -> int:
    """Run this process's part of a job and return the exit code, as `guarded` does."""

    def run_as_rank() -> int:
        config = RuntimeConfig.from_environment()
        rank = config.rank
        if config.launched:
            with suppress(OSError):  # there is no /proc
                Path("/proc/self/comm").write_text(f"scope-rank{rank}")
        return guarded(run, speaker=f"rank {rank}" if rank else "scope-rt")

    return guarded(run_as_rank)
