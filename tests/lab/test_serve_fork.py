"""A fork continues beside its parent, and both outlive their server as they were."""

from pathlib import Path

import pytest

from tests.serve.running_server import NotingClient, running_server, until

pytestmark = pytest.mark.lab


def test_a_fork_continues_from_its_chunk_and_the_first_stream_goes_on(tmp_path: Path) -> None:
    with running_server(tmp_path, "--max-sessions", "2", cold=True) as server:
        parent = server.live()["id"]
        path = f"/v1/sessions/{parent}"
        until(lambda: server.get(path)["chunk_index"] > 6, what="some chunks")
        refused = server.post(f"{path}/fork", {"chunk_index": 10**6})
        assert refused.status_code == 422
        made = server.post(f"{path}/fork", {"chunk_index": 4, "prompt": "a green triangle"})
        assert made.status_code == 201, made.text
        fork = made.json()["id"]
        client = NotingClient(server, fork)
        until(lambda: len(client.of("chunk")) > 3, what="chunks of the fork")
        client.close()
        first = client.of("chunk")[0]
        assert (first["chunk_index"], first["prompt"]) == (4, "a green triangle")
        assert server.get(path)["state"] == "live"
        assert server.get(f"/v1/sessions/{fork}")["forked_from"] == parent
        full = server.post(f"{path}/fork", {"chunk_index": 4})
        assert full.status_code == 503
        assert server.command(parent, kind="pause")["state"] == "applied"
        server.kill()
        server.start()
        until(lambda: server.get(path)["state"] == "paused", what="the pause after the restart")
        until(
            lambda: server.get(f"/v1/sessions/{fork}")["state"] == "live",
            what="the fork after the restart",
        )
