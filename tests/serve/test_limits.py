"""A server has as many sessions and listeners as it may, each session as long as its lease says."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from scope_contracts.errors import UserInputError
from scope_runners.serve.group_control import GroupControl
from scope_runners.serve.settings import ServeSettings, check_keeps_latents
from tests.serve.idle_server import IdleServer, idle_server, idle_settings
from tests.serve.running_server import until

SESSIONS = "/v1/sessions"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[IdleServer]:
    """Whose sessions start, and never have a rank."""
    settings = idle_settings(tmp_path, max_sessions=2, max_viewers=1, lease_s=3600.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupControl, "start", lambda self: None)
        patch.setattr(GroupControl, "runs", True)
        patch.setattr(GroupControl, "wait", lambda self: None)
        with idle_server(settings) as server:
            yield server


def made(server: IdleServer, **asked: Any) -> str:
    with server.client() as client:
        answer = client.post(SESSIONS, json={"prompt": "a red circle", **asked})
    assert answer.status_code == 201, answer.text
    name = answer.json()["id"]
    assert isinstance(name, str)
    return name


def listed(server: IdleServer) -> list[str]:
    with server.client() as client:
        return [each["id"] for each in client.get(SESSIONS).json()]


def test_a_session_beyond_the_limit_is_refused_until_another_is_deleted(
    server: IdleServer,
) -> None:
    first, _ = made(server), made(server)
    with server.client() as client:
        refused = client.post(SESSIONS, json={"prompt": "a red circle"})
        assert refused.status_code == 503
        assert "--max-sessions" in refused.json()["detail"]
        assert client.delete(f"{SESSIONS}/{first}").status_code == 204
        assert client.get(f"{SESSIONS}/{first}").status_code == 404
    assert made(server) in listed(server)


def test_a_session_ends_with_its_lease_unless_somebody_asks_for_it(server: IdleServer) -> None:
    kept, _ = made(server, lease_s=0.0), made(server, lease_s=0.2)
    until(lambda: listed(server) == [kept], what="the end of a lease")
    watched = made(server, lease_s=3.0)
    with server.client() as client:
        for _ in range(40):
            assert client.post(f"{SESSIONS}/{watched}/lease").json() == {"lease_s": 3.0}
            time.sleep(0.1)
    assert watched in listed(server)


def test_a_listener_beyond_the_limit_is_told_so(server: IdleServer) -> None:
    name = made(server)
    url = f"ws://127.0.0.1:{server.port}{SESSIONS}/{name}/events"
    with connect(url) as first, connect(url) as second, connect(url) as third:
        assert state_of(first) == state_of(second) == "starting"
        with pytest.raises(ConnectionClosed, match="4503"):
            third.recv(timeout=30)


def test_what_is_no_command_is_answered_and_the_connection_stays(server: IdleServer) -> None:
    name = made(server)
    with connect(f"ws://127.0.0.1:{server.port}{SESSIONS}/{name}/events") as client:
        state_of(client)
        for text in ("", "{", "[]", '{"kind": "none"}', '{"kind": "prompt", "text": "\\ud800"}'):
            client.send(text)
            while (told := json.loads(client.recv(timeout=30)))["type"] != "error":
                continue
            assert told["detail"]
        client.send(b"\x00")
        with pytest.raises(ConnectionClosed):
            while True:
                client.recv(timeout=30)


def state_of(client: ClientConnection) -> str:
    while (told := json.loads(client.recv(timeout=30)))["type"] != "state":
        continue
    state = told["session"]["state"]
    assert isinstance(state, str)
    return state


def test_a_server_that_keeps_no_latents_says_that_nothing_can_be_rewound() -> None:
    check_keeps_latents(ServeSettings())
    with pytest.raises(UserInputError, match="start it without --no-latents"):
        check_keeps_latents(ServeSettings(keeps_latents=False))


def test_a_listener_of_a_session_that_is_deleted_is_let_go(server: IdleServer) -> None:
    name = made(server)
    with connect(f"ws://127.0.0.1:{server.port}{SESSIONS}/{name}/events") as client:
        state_of(client)
        with server.client() as other:
            assert other.delete(f"{SESSIONS}/{name}").status_code == 204
        with pytest.raises(ConnectionClosed, match="4404"):
            while True:
                client.recv(timeout=30)
