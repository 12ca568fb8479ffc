"""A rank that is killed is named within 2 s, and the stream goes on: no chunk twice, none lost."""

import re
from itertools import product

import pytest

from scope_runners.break_it.cases.ranks import Phase
from scope_runners.break_it.scenario import DEAD_S, RESUME_S, Role
from scope_runners.break_it.verdict import Result
from tests.break_it.broken import Broken

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
    "role", [Role.RANK0, pytest.param(Role.LEADER, marks=pytest.mark.lab), Role.FOLLOWER]
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
