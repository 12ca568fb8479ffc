"""Whatever is killed, the session goes on: no chunk twice or missing, each command taken once."""

import os
import signal
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scope_rt.record.reader import read_history
from tests.serve.running_server import NotingClient, RunningServer, running_server, until

COLOURS = ("red", "green", "blue", "yellow", "purple", "white")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("lost"), "--prompt", "a red circle") as server:
        server.live()
        yield server


def users_of(folder: Path) -> set[int]:
    """Processes that have files of the folder open, as all of a session have, and not this one."""
    users = set[int]()
    for end in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or closed the file
            if end.readlink().is_relative_to(folder):
                users.add(int(end.parts[2]))
    return users - {os.getpid()}


def post_without_waiting(server: RunningServer, session_id: str, number: int) -> str:
    name = uuid.uuid4().hex
    body: dict[str, Any] = {"id": name, "kind": "hard_cut"}
    if number % 3:
        text = f"a {COLOURS[number % len(COLOURS)]} circle"
        body = {"id": name, "kind": "prompt", "text": text}
    answer = server.post(f"/v1/sessions/{session_id}/commands?wait_s=0", body)
    assert answer.status_code == 200, answer.text
    return name


@pytest.mark.parametrize("lost", ["rank0", "server"])
def test_the_session_goes_on_with_the_same_id(server: RunningServer, lost: str) -> None:
    view = server.live()
    session_id, log = view["id"], server.folder / "serve" / "sessions" / view["id"]
    client = NotingClient(server, session_id)
    until(lambda: client.of("chunk"), what="a chunk")
    names = [post_without_waiting(server, session_id, number) for number in range(3)]
    if lost == "rank0":
        num_told = len(client.of("state"))
        os.kill(view["ranks"][0]["pid"], signal.SIGKILL)
        until(
            lambda: "recovering" in [e["session"]["state"] for e in client.of("state")[num_told:]],
            what="that the page is told",
        )
    else:
        server.kill()
        server.start()
    names += [post_without_waiting(server, session_id, number) for number in range(3, 6)]
    begun_at = max(event["chunk_index"] for event in client.of("chunk"))

    def newest() -> int:
        return max(int(event["chunk_index"]) for event in client.of("chunk"))

    until(lambda: newest() > begun_at + 2, what="chunks after the loss")

    def receipts() -> Any:
        told = {each["id"]: each for each in server.get(f"/v1/sessions/{session_id}/commands")}
        return told if all(told[name]["state"] != "pending" for name in names) else None

    told = until(receipts, what="an answer to every command")
    client.close()
    assert {told[name]["state"] for name in names} <= {"applied", "superseded"}
    chunks = [event["chunk_index"] for event in client.of("chunk")]
    assert chunks == sorted(set(chunks)), "given twice, or out of order"
    history = read_history(log / "stream.scope")
    shown = range(chunks[0], chunks[-1] + 1)
    missing = set(shown) - set(chunks) - set(history.dropped)
    # Those that came while this client was not connected were told to nobody.
    assert lost == "server" or not missing
    taken = [name for each in history.controls for name in each.command_ids]
    assert sorted(name for name in taken if name in names) == sorted(names), "each once"


def test_a_server_that_is_ended_leaves_no_process_and_one_after_it_goes_on(
    tmp_path: Path,
) -> None:
    with running_server(tmp_path, "--prompt", "a red circle", "--orphan-timeout", "20") as server:
        session_id, newest = server.live()["id"], server.live()["chunk_index"]
        assert len(users_of(tmp_path)) >= 4, "the server, a launcher, a fork server and a rank"
        assert server.stop() == 0
        assert not users_of(tmp_path)
        server.start()
        view = server.live()
        assert view["id"] == session_id
        assert view["chunk_index"] >= newest
