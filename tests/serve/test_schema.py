"""No request that the schema allows, or nearly allows, is answered by an error of the server's."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("schemathesis")

from scope_runners.serve.group_control import GroupControl
from tests.serve.idle_server import IdleServer, idle_server, idle_settings
from tests.serve.schema_cases import answers

NUM_EXAMPLES = 10


@pytest.fixture
def server(tmp_path: Path) -> Iterator[IdleServer]:
    """Whose sessions start, and never have a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupControl, "start", lambda self: None)
        patch.setattr(GroupControl, "runs", True)
        patch.setattr(GroupControl, "wait", lambda self: None)
        with idle_server(idle_settings(tmp_path, requests_per_s=1e6, max_sessions=2)) as server:
            yield server


def test_no_request_is_answered_by_an_error_of_the_server(server: IdleServer) -> None:
    session = server.sessions.create("a red circle", {})
    gone = ("DELETE", "/v1/sessions/{session_id}")
    counts = answers(
        server, session_id=session.record.id, num_examples=NUM_EXAMPLES, without=(gone,)
    )
    done = {(method, path) for method, path, status in counts if status < 300}
    assert ("POST", "/v1/sessions/{session_id}/commands") in done, counts
    assert ("GET", "/v1/sessions/{session_id}") in done
    assert any(status == 422 for _, _, status in counts)
