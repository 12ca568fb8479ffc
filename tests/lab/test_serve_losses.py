"""Whatever process of a served stream is killed or stopped while clients steer it, what they were
told stays true: each chunk once and in order, one receipt a command, each command applied once."""

import os
import signal
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from scope_rt.record.reader import read_history
from scope_runners.serve.journal import read_journal
from tests.serve.running_server import NotingClient, RunningServer, running_server, until

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

COLOURS = ("red", "green", "blue", "yellow", "purple", "white")
RANK_LOSSES = ("SIGKILL 0", "SIGSTOP 0")
MESH_LOSSES = ("SIGKILL 1", "SIGSTOP 1")
SERVER_LOSSES = ("server", "server and rank 0", "everything")


class Steering:
    """A client that posts commands all the time, each until it is taken."""

    def __init__(self, server: RunningServer, session_id: str) -> None:
        self.posted: list[str] = []
        self._server, self._path = server, f"/v1/sessions/{session_id}/commands?wait_s=0"
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._has_ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        number = 0
        while not self._has_ended.wait(0.3):
            number += 1
            body: dict[str, Any] = {"id": uuid.uuid4().hex, "kind": "hard_cut"}
            if number % 5:
                text = f"a {COLOURS[number % len(COLOURS)]} circle"
                body |= {"kind": "prompt", "text": text}
            if self._is_taken(body):
                self.posted.append(body["id"])

    def _is_taken(self, body: dict[str, Any]) -> bool:
        while not self._has_ended.wait(0.05):
            with suppress(httpx.HTTPError):
                answer = self._server.post(self._path, body)
                assert answer.status_code == 200, answer.text
                return True
        return False


@contextmanager
def steered(folder: Path, *plan: str) -> Iterator[tuple[RunningServer, NotingClient, Steering]]:
    with running_server(folder, "--prompt", "a red circle", *plan, cold=True) as server:
        session_id = server.live()["id"]
        client, steering = NotingClient(server, session_id), Steering(server, session_id)
        try:
            yield server, client, steering
        finally:
            steering.close()
            client.close()


def parent_of(pid: int) -> int:
    stat = Path("/proc", str(pid), "stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def lose(server: RunningServer, lost: str) -> None:
    pids = {each["rank"]: each["pid"] for each in server.session()["ranks"]}
    match lost.split():
        case ["SIGKILL" | "SIGSTOP" as name, rank]:
            os.kill(pids[int(rank)], getattr(signal, name))
            until(lambda: server.session()["state"] == "recovering", what=f"after {lost}: told")
            return
        case ["server", "and", *_]:
            server.kill()
            os.kill(pids[0], signal.SIGKILL)
        case ["everything"]:
            launcher = parent_of(parent_of(pids[0]))  # between them is the fork server
            command = Path("/proc", str(launcher), "cmdline").read_bytes()
            assert b"scope_runners.serve.group_process" in command
            server.kill()
            os.kill(launcher, signal.SIGKILL)
            for pid in pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        case _:
            server.kill()
    server.start()


def newest(client: NotingClient) -> int:
    return max((int(event["chunk_index"]) for event in client.of("chunk")), default=-1)


def shows_more(client: NotingClient, than: int, *, what: str) -> None:
    until(lambda: newest(client) > than + 2, what=what)


CASES = [
    ("single", (), (*RANK_LOSSES, *SERVER_LOSSES)),
    ("pp1", ("--plan", "pp1", "--tp", "1"), (*RANK_LOSSES, *MESH_LOSSES, "server")),
    ("tp_v1_1", ("--plan", "tp_v1_1", "--tp", "2"), (*RANK_LOSSES, *MESH_LOSSES, "server")),
]


@pytest.mark.parametrize(("plan", "losses"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_clients_were_told_stays_true(
    tmp_path: Path, plan: tuple[str, ...], losses: tuple[str, ...]
) -> None:
    with steered(tmp_path, *plan) as (server, client, steering):
        session_id = server.session()["id"]
        until(lambda: newest(client) >= 2, what="chunks")
        for lost in losses:
            lose(server, lost)
            view = until(lambda: server.session()["ranks"], what="ranks")
            assert server.session()["id"] == session_id
            begun_at = newest(client)
            shows_more(client, begun_at, what=f"{lost}: chunks, {view}")
        steering.close()
        path = f"/v1/sessions/{session_id}/commands"

        def answered() -> Any:
            told = {each["id"]: each for each in server.get(path)}
            return told if all(each["state"] != "pending" for each in told.values()) else None

        receipts = until(answered, what="an answer to every command")
    files = tmp_path / "serve" / "sessions" / session_id
    history = read_history(files / "stream.scope")
    in_log = Counter(name for each in history.controls for name in each.command_ids)
    assert set(receipts) == set(steering.posted), "one receipt a command"
    assert {each["state"] for each in receipts.values()} <= {"applied", "superseded"}
    assert in_log == Counter(steering.posted), "each applied once"
    facts = [fact for fact in read_journal(files / "journal") if fact["fact"] == "taken"]
    taken = [index for fact in facts for index in range(fact["chunk"], fact["last"] + 1)]
    assert taken == sorted(set(taken)), "a chunk twice, or out of order"
    assert not set(range(taken[-1])) - set(taken) - set(history.dropped), "a chunk is missing"
    told = [event["chunk_index"] for event in client.of("chunk")]
    assert told == sorted(set(told))
