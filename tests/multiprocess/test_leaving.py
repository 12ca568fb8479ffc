"""A rank that has left has ended the threads of its groups: one that came for Python's lock while
the interpreter ends would end the process by SIGABRT, in place of the error that it was to say."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from scope_contracts.errors import ScopeError
from scope_rt.config import StreamConfig
from scope_rt.mesh.sums import TorchCollectives
from scope_rt.session import StreamSession
from tests.multiprocess.ranks import Ranks


def threads_with_tensors() -> int:
    """Of gloo's: the loop of its sockets knows addresses alone."""
    names = list[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    return names.count("pt_gloo_runloop")


def threads_left() -> int:
    """The kernel lists a thread for a moment after it was joined."""
    deadline_s = time.monotonic() + 5.0
    while (left := threads_with_tensors()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return left


def fail(self: TorchCollectives, tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not a failure of a group")


def leave(folder: Path, why: str) -> tuple[str, int, int]:
    """What was raised, how many threads there were, and are left while all is still held.

    Rank 1 makes the difference.
    """
    is_odd, num_before = os.environ["RANK"] == "1", 0
    height = 32 if is_odd and why == "refused" else 48
    with pytest.MonkeyPatch.context() as patch:
        try:
            config = StreamConfig.load(model=folder, plan="tp_v1_1", tp=2, height=height)
            with StreamSession(config) as session:
                num_before = threads_with_tensors()
                if is_odd and why == "lost":
                    patch.setattr(TorchCollectives, "all_reduce_sum", fail)
                list(session.stream("red circle", num_chunks=1))
        except (ScopeError, RuntimeError) as held:
            return type(held).__name__, num_before, threads_left()
    return "", num_before, threads_left()


@pytest.mark.parametrize(
    ("why", "raised"),
    [
        ("closed", ("", "")),
        ("refused", ("ParityError", "ParityError")),
        ("lost", ("PeerLostError", "RuntimeError")),
    ],
)
def test_who_leaves_ends_the_threads_of_its_groups(
    ranks: Ranks, folder: Path, why: str, raised: tuple[str, str]
) -> None:
    left = ranks.results(2, leave, folder=folder, why=why)
    assert [error for error, _, _ in left] == list(raised)
    assert [num_before > 0 for _, num_before, _ in left] == [why != "refused"] * 2
    assert [num_left for _, _, num_left in left] == [0, 0]
