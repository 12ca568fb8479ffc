"""A pool of rank processes that stays up over many tests; not a test itself.

Starting torch in four processes takes longer than most tests. Each process runs one function after
another, in a fresh process group each time; every wait has a bound, and a rank that overruns it is
killed with the pool.
"""

import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from scope_rt.mesh.process_group import leave_world
from tests import warm_python

ROOT = Path(__file__).parents[2]
DEFAULTS = {
    "SCOPE_KV_BIAS_BACKEND": "sdpa",
    "SCOPE_GROUP_TIMEOUT_S": "30",
    "SCOPE_INTEGRITY": "default",
}
"""What a job of the pool may have changed for the next one."""
START_S = 100.0
"""How long the processes may take to be there, which is no part of any job."""
Job = Callable[..., Any]


@contextmanager
def kept_port() -> Iterator[int]:
    """A port that nobody else is given meanwhile; a store shares addresses and may listen there."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield int(keeper.getsockname()[1])


def free_port() -> int:
    with kept_port() as port:
        return port


def run_jobs(pipe: int) -> None:
    """The life of one rank process, which takes its jobs from `pipe`."""
    jobs = Connection(pipe)
    torch.set_num_threads(1)
    jobs.send("here")
    while True:
        job, environ, arguments = jobs.recv()
        os.environ.update(environ)
        try:
            jobs.send((job(**arguments), None))
        except Exception as error:  # noqa: BLE001 - whatever a rank raises is what the test sees
            jobs.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        finally:
            leave_world()


class Ranks:
    """Up to `size` ranks."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pipes: list[Connection] = []
        self._processes: list[warm_python.Process] = []

    def _start(self) -> None:
        for _ in range(self._size):
            here, there = Pipe()
            code = f"from {__name__} import run_jobs; run_jobs({there.fileno()})"
            command = [sys.executable, "-c", code]
            process = warm_python.Process(command, cwd=ROOT, pass_fds=[there.fileno()])
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        for rank in range(self._size):
            self._answer(rank, within_s=START_S)

    def run(
        self,
        world_size: int,
        job: Job,
        *,
        bound_s: float = 60.0,
        per_rank: dict[int, dict[str, str]] | None = None,
        **arguments: Any,
    ) -> list[tuple[Any, str | None]]:
        """Run `job` on `world_size` ranks: for each, what it returned and what it raised.

        `per_rank` adds environment variables to single ranks. Starts the processes where none are,
        at first and after a job that overran `bound_s`.
        """
        if not self._processes:
            self._start()
        with kept_port() as port:
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            for rank, pipe in enumerate(self._pipes[:world_size]):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
                environ = shared | place | DEFAULTS
                pipe.send((job, environ | (per_rank or {}).get(rank, {}), arguments))
            return [self._answer(rank, within_s=bound_s) for rank in range(world_size)]

    def results(self, world_size: int, job: Job, **arguments: Any) -> list[Any]:
        """Like `run`, for jobs that must not raise."""
        answers = self.run(world_size, job, **arguments)
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        assert not errors, "\n".join(errors)
        return [result for result, _ in answers]

    def _answer(self, rank: int, *, within_s: float) -> Any:
        if not self._pipes[rank].poll(within_s):
            self.kill()
            raise TimeoutError(f"rank {rank} gave no answer within {within_s} s")
        return self._pipes[rank].recv()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(10)
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
