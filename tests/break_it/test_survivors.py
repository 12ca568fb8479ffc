"""A stream goes on, or says what holds it up, when a rank, a consumer or a disk fails.

In one file, for all of it is held against the same few clean runs.
"""

import re
from itertools import product

import pytest

from scope_runners.break_it.cases.ranks import Phase
from scope_runners.break_it.scenario import DEAD_S, RESUME_S, Role
from scope_runners.break_it.verdict import Result
from tests.break_it.broken import HEARTBEAT_S, Broken, said

RANKS = {Role.RANK0: 0, Role.LEADER: 1, Role.FOLLOWER: 2}

IN_THE_SUITE = [
    (Role.RANK0, Phase.SEND),
    (Role.RANK0, Phase.RECOMPUTE),
    (Role.LEADER, Phase.IDLE),
    (Role.LEADER, Phase.DENOISE),
    (Role.FOLLOWER, Phase.SEND),
    (Role.FOLLOWER, Phase.RECOMPUTE),
]
"""Every role, and every phase; the laboratory has each role in each phase."""


@pytest.mark.parametrize(
    ("role", "phase"),
    [
        pytest.param(*case, marks=[] if case in IN_THE_SUITE else pytest.mark.lab)
        for case in product(Role, Phase)
    ],
)
def test_the_stream_survives_a_killed_rank(broken: Broken, role: Role, phase: Phase) -> None:
    check_survives(broken(f"kill/{role}/{phase}"), role)


@pytest.mark.parametrize(
    "role",
    [*(pytest.param(r, marks=pytest.mark.lab) for r in (Role.RANK0, Role.LEADER)), Role.FOLLOWER],
)
def test_so_does_one_that_began_with_a_picture_that_is_gone(broken: Broken, role: Role) -> None:
    check_survives(broken(f"kill-picture/{role}"), role)


def check_survives(result: Result, role: Role) -> None:
    assert result.ends[RANKS[role]] == "killed"
    assert result.detected_s is not None
    assert result.detected_s < DEAD_S
    assert result.resumed_s is not None
    assert result.resumed_s < RESUME_S
    assert result.num_chunks == 8
    named = re.compile(rf"\brank {RANKS[role]} (closed the connection|sent no heartbeat)")
    assert len(result.sentences) == 2
    assert all(named.search(sentence) for sentence in result.sentences)


# A rank that is stopped is named within the heartbeat's bound, and the stream goes on.
@pytest.mark.parametrize(
    "role", [Role.RANK0, Role.LEADER, pytest.param(Role.FOLLOWER, marks=pytest.mark.lab)]
)
def test_the_stream_survives_a_stopped_rank(broken: Broken, role: Role) -> None:
    result = broken(f"stop/{role}")
    others = [end for rank, end in enumerate(result.ends) if rank != RANKS[role]]
    assert others == ["LinkTimeoutError"] * 2
    assert result.detected_s is not None
    assert result.detected_s < HEARTBEAT_S
    assert result.num_chunks == 8
    assert all(f"rank {RANKS[role]} sent no heartbeat" in said for said in result.sentences)


# A rank that holds up all others is named, and a group without it goes on.
def test_a_rank_ten_times_slower_than_the_other_is_named_by_both(broken: Broken) -> None:
    result = broken("slow-rank")
    assert result.ends == ("SlowRankError",) * 2
    assert "rank 1 computes" in said(result, 0)
    assert result.num_chunks == 8


# An exception in user code keeps its own name, ends its rank, and the stream goes on.
@pytest.mark.parametrize(
    "role", [Role.RANK0, pytest.param(Role.LEADER, marks=pytest.mark.lab), Role.FOLLOWER]
)
def test_the_stream_survives_an_exception_in_user_code(broken: Broken, role: Role) -> None:
    result = broken(f"user-code/{role}")
    assert said(result, RANKS[role]).startswith("ZeroDivisionError: injected")
    assert result.num_chunks == 8


# A full disk ends the recording at its last whole record, and nothing else.
def test_the_stream_goes_on_whole_when_its_recording_cannot(broken: Broken) -> None:
    result = broken("disk-full")
    assert (result.ends, result.num_chunks) == (("left",) * 2, 8)


# A viewer who never reads loses its own chunks and nobody else's.
def test_neither_the_stream_nor_another_viewer_notices_one_who_never_reads(
    broken: Broken,
) -> None:
    result = broken("idle-viewers")
    assert (result.ends, result.num_chunks) == (("left",) * 2, 8)
