"""An exception in user code keeps its own name, ends its rank, and the stream goes on."""

import pytest

from scope_runners.break_it.scenario import Role
from tests.break_it.broken import Broken, said

RANKS = {Role.RANK0: 0, Role.LEADER: 1, Role.FOLLOWER: 2}


@pytest.mark.parametrize(
    "role", [Role.RANK0, pytest.param(Role.LEADER, marks=pytest.mark.lab), Role.FOLLOWER]
)
def test_the_stream_survives_an_exception_in_user_code(broken: Broken, role: Role) -> None:
    result = broken(f"user-code/{role}")
    assert said(result, RANKS[role]).startswith("ZeroDivisionError: injected")
    assert result.num_chunks == 8
