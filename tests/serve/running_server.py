"""A server process of a test, and a client that notes all that it is told; not a test itself."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from tests.warm_python import Process

START_S = 90.0
"""A bound, not a measure: machines of tests are busy."""


class RunningServer:
    """`scope-rt serve` on a free port, with files in `folder`; started again, it continues.

    It is forked, as its launchers and ranks are, from a process that has imported them; one that is
    `cold` starts as a user's does.
    """

    def __init__(self, folder: Path, *arguments: str, cold: bool = False) -> None:
        self.folder, self.arguments = folder, arguments
        self._starts: Any = subprocess.Popen if cold else Process
        self.output = folder / "server.log"
        self.url = ""
        self._process: subprocess.Popen[bytes] | Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        begins_at = self.output.stat().st_size if self.output.exists() else 0
        port = self.url.rsplit(":", 1)[1].strip("/") if self.url else "0"
        with self.output.open("ab") as output:
            self._process = self._starts(
                [
                    *(sys.executable, "-m", "scope_runners.main", "serve"),
                    *("--folder", str(self.folder / "serve"), "--port", port, *self.arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

        def said() -> str:
            text = self.output.read_bytes()[begins_at:].decode()
            lines = [line for line in text.splitlines() if line.startswith("scope-rt: http")]
            return lines[0].removeprefix("scope-rt: ").split("?")[0] if lines else ""

        self.url = until(said, what=f"the server's address in {self.output}").rstrip("/")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def stop(self) -> int:
        """As a person does; returns the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(120)

    def get(self, path: str) -> Any:
        answer = httpx.get(self.url + path, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=90)

    def session(self) -> dict[str, Any]:
        """The only one."""
        (session,) = self.get("/v1/sessions")
        assert isinstance(session, dict)
        return session

    def live(self) -> dict[str, Any]:
        """The only session, once it is live and has shown a frame."""

        def view() -> dict[str, Any] | None:
            session = self.session()
            assert session["state"] != "failed", session["detail"]
            return session if session["state"] == "live" and session["media_time_s"] else None

        found = until(view, what="a live session")
        assert isinstance(found, dict)
        return found

    def command(self, session_id: str, **command: Any) -> dict[str, Any]:
        """Its receipt."""
        answer = self.post(f"/v1/sessions/{session_id}/commands?wait_s=60", command)
        assert answer.status_code == 200, answer.text
        receipt = answer.json()
        assert isinstance(receipt, dict)
        return receipt


@contextmanager
def running_server(folder: Path, *arguments: str, cold: bool = False) -> Iterator[RunningServer]:
    server = RunningServer(folder, *arguments, cold=cold)
    server.start()
    try:
        yield server
    finally:
        server.stop()


class NotingClient:
    """Listens to a session's events, over any number of connections, and keeps all of them."""

    def __init__(self, server: RunningServer, session_id: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._server, self._session_id = server, session_id
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    def close(self) -> None:
        self._has_ended.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._has_ended.is_set():
            last = max((event["seq"] for event in self.events if "seq" in event), default=0)
            url = self._server.url.replace("http", "ws")
            try:
                with connect(f"{url}/v1/sessions/{self._session_id}/events?after={last}") as socket:
                    while not self._has_ended.is_set():
                        try:
                            self.events.append(json.loads(socket.recv(timeout=0.2)))
                        except TimeoutError:
                            continue
            except (OSError, WebSocketException):
                self._has_ended.wait(0.1)


def until(look: Callable[[], Any], *, what: str, within_s: float = START_S) -> Any:
    """What `look` returns, once that is something."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {within_s:g} s")
