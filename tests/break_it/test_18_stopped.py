"""A rank that is stopped is named within the heartbeat's bound, and the stream goes on."""

import pytest

from scope_runners.break_it.scenario import Role
from tests.break_it.broken import HEARTBEAT_S, Broken

RANKS = {Role.RANK0: 0, Role.LEADER: 1, Role.FOLLOWER: 2}


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
