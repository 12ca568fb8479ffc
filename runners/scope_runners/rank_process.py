"""A mesh rank's errors carry its number; rank0, or a process alone, speaks for the command."""

from collections.abc import Callable

from scope_rt.config import RuntimeConfig
from scope_runners.main import guarded


def guarded_rank(run: Callable[[], int]) -> int:
    """Run this process's part of a job and return the exit code, as `guarded` does."""

    def run_as_rank() -> int:
        rank = RuntimeConfig.from_environment().rank
        return guarded(run, speaker=f"rank {rank}" if rank else "scope-rt")

    return guarded(run_as_rank)
