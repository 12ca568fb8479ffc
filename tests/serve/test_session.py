"""What a session promises its clients, whatever its rank0 does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scope_runners.serve.messages import Command, CommandKind, Credit
from scope_runners.serve.session import LiveSession
from tests.serve.lone_session import rank0_of, session_in, without_processes


@pytest.fixture
def session(tmp_path: Path) -> Iterator[LiveSession]:
    with without_processes():
        session = session_in(tmp_path / "session")
        yield session
        session.end("the test ends")


def test_cuts_that_are_posted_before_a_chunk_comes_share_one_chunk(session: LiveSession) -> None:
    with rank0_of(session) as rank0:
        names = {session.post(CommandKind.HARD_CUT, {}).id for _ in range(50)}
        credit = 0
        while names:
            match rank0.receive()[0]:
                case Command(command_id=name):
                    names.remove(name)
                case Credit(end=end):
                    credit = max(credit, end)
        assert 0 < credit <= 2, "chunks that nobody has asked for wait before the next prompt"
