"""Ranks that disagree, or lose each other, raise a named error everywhere, within a bound."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from scope_contracts.call_budget import CallBudget
from scope_contracts.errors import LinkTimeoutError
from scope_rt.checks import Checks
from scope_rt.config import StreamConfig
from scope_rt.instruments import Instruments
from scope_rt.mesh.worker import Worker
from scope_rt.models.loading import WEIGHTS_NAME
from scope_rt.session import StreamSession
from tests.multiprocess.ranks import DEFAULTS, ROOT, Ranks, kept_port


def made(folder: Path, **settings: Any) -> StreamConfig:
    return StreamConfig.load(model=folder, **settings)


def stream_two_chunks(folder: Path, plan: str, tp: int, odd: dict[str, int] | None = None) -> int:
    """Stream; rank 1 takes other arguments than rank0 where `odd` says so."""
    arguments = (odd or {}) if os.environ["RANK"] == "1" else {}
    with StreamSession(made(folder, plan=plan, tp=tp, **arguments)) as session:
        return len(list(session.stream("red circle", num_chunks=2)))


def test_another_attention_backend_on_one_rank_stops_all_ranks(ranks: Ranks, folder: Path) -> None:
    answers = ranks.run(
        2,
        stream_two_chunks,
        folder=folder,
        plan="tp_v1_1",
        tp=2,
        per_rank={1: {"SCOPE_KV_BIAS_BACKEND": "reference"}},
    )
    for _, error in answers:
        assert error is not None
        assert error.startswith("ParityError: kv_bias_backend (SCOPE_KV_BIAS_BACKEND): rank 0 has")


STREAM = """
import sys, torch
from pathlib import Path
from tests.multiprocess.test_refusals import stream_two_chunks

torch.set_num_threads(1)
print(stream_two_chunks(Path(sys.argv[1]), plan="tp_v1_1", tp=2))
"""


def refused_for_its_cpu(said: str) -> bool:
    refusal = r"ParityError: processor: rank \d has '\w+', rank \d has '\w+'; "
    return re.search(refusal, said) is not None and "--integrity off" in said


def stream_on_unlike_cpus(folder: Path, integrity: str) -> list[tuple[int, str]]:
    """Exit code and output of two processes as a user starts them, of which rank 1 has the kernels
    of the least CPU there is."""
    with kept_port() as port:
        processes = [
            subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", STREAM, str(folder)],
                env=os.environ
                | DEFAULTS
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "SCOPE_INTEGRITY": integrity,
                }
                | ({"ATEN_CPU_CAPABILITY": "default"} if rank == 1 else {}),
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        said = [process.communicate(timeout=100)[0] for process in processes]
    return [(process.returncode, each) for process, each in zip(processes, said, strict=True)]


@pytest.mark.lab
def test_unlike_cpus_are_refused_at_the_start_and_told_what_to_do(folder: Path) -> None:
    for code, said in stream_on_unlike_cpus(folder, "default"):
        assert code == 1, f"exit code {code}\n{said}"
        assert refused_for_its_cpu(said.strip().splitlines()[-1])


@pytest.mark.lab
def test_what_unlike_cpus_compute_is_not_compared_where_they_may_stream(folder: Path) -> None:
    ended = stream_on_unlike_cpus(folder, "off")
    assert [(code, said.strip().splitlines()[-1]) for code, said in ended] == [(0, "2"), (0, "0")]


def stream_on_another_cpu(folder: Path, plan: str) -> int:
    """Rank 1 says that it has the least CPU there is."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        return stream_two_chunks(folder, plan=plan, tp=2)


def test_every_rank_of_a_pipeline_refuses_another_ones_cpu(ranks: Ranks, folder: Path) -> None:
    for _, error in ranks.run(3, stream_on_another_cpu, folder=folder, plan="pp0"):
        assert error is not None
        assert refused_for_its_cpu(error.splitlines()[0])


def test_unlike_cpus_stream_where_nothing_is_compared(ranks: Ranks, folder: Path) -> None:
    off = {"SCOPE_INTEGRITY": "off"}
    answers = ranks.run(
        2, stream_on_another_cpu, per_rank={0: off, 1: off}, folder=folder, plan="tp_v1_1"
    )
    assert answers == [(2, None), (0, None)]


def test_another_picture_size_on_one_rank_stops_all_ranks(ranks: Ranks, folder: Path) -> None:
    answers = ranks.run(2, stream_two_chunks, folder=folder, plan="pp1", tp=1, odd={"height": 32})
    assert all(error and error.startswith("ParityError: world_layout") for _, error in answers)


def stream_own_copy(folders: tuple[Path, Path]) -> None:
    """Each rank streams from a folder of its own, as ranks of two hosts do."""
    own = folders[int(os.environ["RANK"])]
    with StreamSession(StreamConfig.load(model=own, plan="pp1", tp=1)) as session:
        list(session.stream("red circle", num_chunks=1))


def test_another_bit_in_one_ranks_copy_of_the_weights_stops_all_ranks(
    ranks: Ranks, folder: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    weights = copy / "transformer" / WEIGHTS_NAME
    ranks.results(2, stream_own_copy, folders=(folder, copy))
    altered = bytearray(weights.read_bytes())
    altered[-1] ^= 1
    weights.write_bytes(altered)
    for _, error in ranks.run(2, stream_own_copy, folders=(folder, copy)):
        assert error is not None
        assert error.startswith("ParityError: model_fingerprint: rank 0 has")


def fail_in_user_code(folder: Path) -> None:
    """Rank0's own code raises between two chunks; the mesh must still be told to stop."""
    with StreamSession(made(folder, plan="pp1", tp=1)) as session:
        for chunk in session.stream("red circle"):
            if chunk.chunk_index == 2:
                raise ZeroDivisionError("user code")


def test_an_exception_in_user_code_lets_the_mesh_leave_in_peace(ranks: Ranks, folder: Path) -> None:
    (_, rank0), (_, rank1) = ranks.run(2, fail_in_user_code, folder=folder)
    assert rank0 is not None
    assert rank0.startswith("ZeroDivisionError")
    assert rank1 is None


def leave(*arguments: object) -> None:
    raise InterruptedError


def abandon(folder: Path) -> None:
    """Rank 1 takes what rank0 has sent it, and leaves without a word instead of an answer."""
    session = StreamSession(made(folder, plan="pp0", tp=1))
    with pytest.MonkeyPatch.context() as patch, suppress(InterruptedError):
        if os.environ["RANK"] == "1":
            patch.setattr(Worker, "execute", leave)
        list(session.stream("red circle", num_chunks=2))


def test_a_peer_that_leaves_is_a_named_error(ranks: Ranks, folder: Path) -> None:
    (_, error), _ = ranks.run(2, abandon, folder=folder, bound_s=30)
    assert error is not None
    assert error.startswith("PeerLostError: chunk 0: receive from rank 1")


def count_twice(budget: CallBudget) -> None:
    budget.enter()
    budget.enter()


def one_call_too_many(folder: Path) -> None:
    """Rank 1's schedule is longer than the plan's budget."""
    is_odd = os.environ["RANK"] == "1"
    checks = Checks(count_call=count_twice) if is_odd else Checks()
    instruments = Instruments(checks=checks)
    with StreamSession(made(folder, plan="pp0", tp=1), instruments=instruments) as session:
        list(session.stream("red circle", num_chunks=1))


def test_a_call_beyond_the_budget_is_refused_on_entry_and_frees_its_peer(
    ranks: Ranks, folder: Path
) -> None:
    (_, rank0), (_, rank1) = ranks.run(2, one_call_too_many, folder=folder, bound_s=30)
    assert rank1 is not None
    assert rank1.startswith("CallCountError: chunk 0: generator call 4, budget 3")
    assert rank0 is not None
    assert rank0.startswith(
        "PeerLostError: chunk 0: receive from rank 1: rank 1 failed with CallCountError: chunk 0: "
    )


def stop_the_mesh(folder: Path, plan: str, tp: int, pids: Path) -> float:
    """Rank 1 is stopped by the kernel after the first chunk; rank0 measures its own patience."""
    if os.environ["RANK"] == "1":
        pids.write_text(str(os.getpid()))
    with StreamSession(made(folder, plan=plan, tp=tp)) as session:
        stream = session.stream("red circle")
        for _ in stream:
            break
        if os.environ["RANK"] != "0":
            return 0.0
        stopped = int(pids.read_text())
        os.kill(stopped, signal.SIGSTOP)
        started_s = time.monotonic()
        try:
            with pytest.raises(LinkTimeoutError, match=r"^chunk 1: "):
                list(stream)
            return time.monotonic() - started_s
        finally:
            os.kill(stopped, signal.SIGCONT)


@pytest.mark.parametrize(("plan", "tp"), [("pp0", 1), ("tp_v1_1", 2)])
def test_a_stopped_rank_is_noticed_within_the_bound(
    ranks: Ranks, folder: Path, tmp_path: Path, plan: str, tp: int
) -> None:
    bound = {"SCOPE_GROUP_TIMEOUT_S": "3"}
    (waited_s, error), _ = ranks.run(
        2,
        stop_the_mesh,
        bound_s=40,
        per_rank={0: bound, 1: bound},
        folder=folder,
        plan=plan,
        tp=tp,
        pids=tmp_path / "pid",
    )
    assert error is None
    assert 2 < waited_s < 10


def test_a_session_streams_twice_on_a_pipelined_plan(ranks: Ranks, folder: Path) -> None:
    assert ranks.results(2, two_streams, folder=folder) == [4, 0]


def two_streams(folder: Path) -> int:
    """Two streams, one session; every rank runs the same lines."""
    with StreamSession(made(folder, plan="pp1", tp=1)) as session:
        first = list(session.stream("red circle", num_chunks=2))
        return len(first) + len(list(session.stream("blue square", num_chunks=2)))


@pytest.mark.parametrize(("plan", "tp", "message"), [("pp0", 2, "needs 3 processes, got 2")])
def test_a_wrong_number_of_ranks_is_one_sentence(
    ranks: Ranks, folder: Path, plan: str, tp: int, message: str
) -> None:
    answers = ranks.run(2, stream_two_chunks, folder=folder, plan=plan, tp=tp)
    assert all(error and message in error for _, error in answers)
