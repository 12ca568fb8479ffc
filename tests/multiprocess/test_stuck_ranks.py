"""A rank that cannot leave by itself is ended within a stated bound, and says why."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scope_runners.exit_codes import FAILED, INTEGRITY
from tests import warm_python
from tests.multiprocess.ranks import kept_port

HEARTBEAT_S = 2.0
BEGUN_WITHIN_S = 60.0
"""For a rank to start and reach the chunk, on a busy machine."""
SLACK_S = 8.0
"""The same for what comes after it."""
RANK = """
import atexit, os, sys, time
from pathlib import Path
import scope_rt.mesh.process_group as groups
from scope_contracts.errors import CacheError, IntegrityError
from scope_rt.config import StreamConfig
from scope_rt.instruments import Instruments
from scope_rt.models.generator import ChunkGenerator
from scope_rt.session import StreamSession
from scope_rt.watchdog import Watchdog
from scope_runners.guarded import end_stuck, guarded

rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
real, is_stuck = ChunkGenerator.generate, folder / "stuck"

def fail():
    while not is_stuck.exists():
        time.sleep(0.01)
    (folder / "failed").write_text(str(time.time()))

def generate(self, envelope, *rest):
    if envelope.chunk_index != 1:
        return real(self, envelope, *rest)
    if rank == 1:
        {STUCK}
    fail()
    raise {ERROR}

ChunkGenerator.generate = generate
{MORE}

def run():
    config = StreamConfig.load(plan="tp_v1_1", tp=2)
    with StreamSession(config, instruments=Instruments(watchdog=Watchdog(end_stuck))) as session:
        list(session.stream("red circle", num_chunks=3))
    return 0

sys.exit(guarded(run, speaker=f"rank {rank}"))
"""
SLEEPS = "is_stuck.touch(); time.sleep(600)"
"""As in a kernel that hangs: only the process can be ended."""
IN_A_SUM = "is_stuck.touch(); return real(self, envelope, *rest)"
"""A real all_reduce of gloo, which rank 0 never enters."""
NO_ABORT = """
groups.shut_down = lambda sockets: None
def leave(world):
    atexit.unregister(world.leave)
    time.sleep(8)
if rank == 0:
    groups.World.leave = leave
"""
"""As if the library did not end its waits when it is told to; rank 0 does not end them either."""
CACHE_ERROR = "CacheError('chunk 1: read past the ring')"


def run_ranks(folder: Path, *, stuck: str, error: str, more: str = "") -> list[tuple[int, str]]:
    """Exit code and last line of rank 0, which fails in chunk 1, and of rank 1, which is stuck
    there; seconds from the failure to the end of rank 1 are in `ended`."""
    code = RANK.replace("{STUCK}", stuck).replace("{ERROR}", error).replace("{MORE}", more)
    said = [folder / f"rank{rank}" for rank in range(2)]
    processes = []
    with kept_port() as port:
        for rank, path in enumerate(said):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            bound = {"SCOPE_HEARTBEAT_TIMEOUT_S": str(HEARTBEAT_S), "SCOPE_INTEGRITY": "off"}
            with path.open("w") as err:
                command = [sys.executable, "-c", code, str(folder)]
                env = {**os.environ, **place, **meet, **bound}
                processes.append(
                    warm_python.Process(command, env=env, cwd=folder, stderr=err.fileno())
                )
        try:
            codes = [process.wait(BEGUN_WITHIN_S) for process in processes]
        except subprocess.TimeoutExpired:
            pytest.fail("hung: " + " | ".join(path.read_text() for path in said))
        finally:
            for process in processes:
                process.kill()
    ended_s = time.time() - float((folder / "failed").read_text())
    assert ended_s < 2 * HEARTBEAT_S + SLACK_S
    return [(code, path.read_text()) for code, path in zip(codes, said, strict=True)]


@pytest.mark.parametrize(
    ("stuck", "more"), [(SLEEPS, ""), (IN_A_SUM, NO_ABORT)], ids=["kernel", "sum"]
)
def test_a_rank_that_is_stuck_when_another_one_fails_ends_and_says_why(
    tmp_path: Path, stuck: str, more: str
) -> None:
    (code_0, said_0), (code_1, said_1) = run_ranks(
        tmp_path, stuck=stuck, error=CACHE_ERROR, more=more
    )
    assert (code_0, code_1) == (FAILED, FAILED)
    assert "rank 0: chunk 1: read past the ring" in said_0
    why = "rank 0 failed with CacheError: chunk 1: read past the ring"
    assert f"chunk 1: generating: {why}" in said_1
    assert "did not end within 2 s of that" in said_1


def test_a_sum_that_waits_for_a_rank_that_failed_ends_at_once_and_says_why(
    tmp_path: Path,
) -> None:
    _, (code, said) = run_ranks(tmp_path, stuck=IN_A_SUM, error=CACHE_ERROR)
    assert code == FAILED
    assert "all_reduce in the generator group: rank 0 failed with CacheError" in said
    assert "did not end within" not in said


def test_a_stuck_rank_ends_with_the_exit_code_of_what_another_one_found_wrong(
    tmp_path: Path,
) -> None:
    wrong = "IntegrityError('chunk 1: rank 0: text keys of layer 0 is not what was computed')"
    codes, said = zip(*run_ranks(tmp_path, stuck=SLEEPS, error=wrong), strict=True)
    assert codes == (INTEGRITY, INTEGRITY)
    assert "text keys of layer 0 is not what was computed" in said[1]


def test_words_of_an_error_that_is_not_ours_do_not_reach_the_store(tmp_path: Path) -> None:
    """They may quote a prompt, and others may read the store."""
    _, (_, said) = run_ranks(tmp_path, stuck=SLEEPS, error="KeyError('a red circle')")
    assert "rank 0 failed in chunk 1 with KeyError" in said
    assert "red circle" not in said
