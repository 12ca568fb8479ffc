"""A rewind that cannot be done is refused once, and the stream goes on."""

from pathlib import Path

import pytest

from tests.serve.running_server import running_server, until


@pytest.mark.parametrize("mesh", [(), ("--plan", "pp1", "--tp", "2")], ids=["one rank", "three"])
def test_chunks_without_latents_are_not_rewound_to_and_the_session_lives(
    tmp_path: Path, mesh: tuple[str, ...]
) -> None:
    with running_server(tmp_path, "--prompt", "a red circle", "--no-latents", *mesh) as server:
        until(lambda: server.live()["chunk_index"] >= 2, what="some chunks")
        session_id = server.live()["id"]
        assert server.stop() == 0
        server.arguments = ("--prompt", "a red circle", *mesh)
        server.start()
        newest = server.live()["chunk_index"]
        receipt = server.command(session_id, kind="rewind", chunk_index=1)
        assert receipt["state"] == "refused", receipt
        assert "latents" in receipt["error"]
        until(lambda: server.live()["chunk_index"] > newest, what="a chunk after the refusal")
        assert server.session()["stats"]["recoveries"] <= 2
