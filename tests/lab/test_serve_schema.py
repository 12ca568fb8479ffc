"""A live server is asked all that its schema allows, or nearly allows; no answer is its error."""

from pathlib import Path

import pytest

pytest.importorskip("schemathesis")

from tests.serve.running_server import running_server
from tests.serve.schema_cases import answers

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

NUM_EXAMPLES = 25
SLOW = (
    ("DELETE", "/v1/sessions/{session_id}"),
    ("POST", "/v1/sessions/{session_id}/fork"),
)
"""Each ends or starts ranks."""


def test_a_live_session_is_asked_everything(tmp_path: Path) -> None:
    with running_server(tmp_path, "--prompt", "a red circle", "--max-rate", "10000") as server:
        session_id = server.live()["id"]
        counts = answers(server, session_id=session_id, num_examples=NUM_EXAMPLES, without=SLOW)
        assert server.session()["id"] == session_id
        server.live()
    done = {(method, path) for method, path, status in counts if status < 300}
    assert ("POST", "/v1/sessions/{session_id}/commands") in done, counts
    assert ("GET", "/v1/sessions/{session_id}/recordings") in done
