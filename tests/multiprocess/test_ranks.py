"""The pool of rank processes outlives a job that does not end."""

import time

import pytest

from tests.multiprocess.ranks import Ranks


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_a_pool_that_was_killed_starts_anew_for_the_next_job() -> None:
    pool = Ranks(1)
    try:
        with pytest.raises(TimeoutError, match="rank 0 gave no answer"):
            pool.run(1, sleep, bound_s=0.1, seconds=60.0)
        assert pool.results(1, dict, answer=1) == [{"answer": 1}]
    finally:
        pool.kill()
