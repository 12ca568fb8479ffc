"""A guarded server without a session, on a thread of the test; not a test itself."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from scope_runners.serve.api import create_app
from scope_runners.serve.server import uvicorn_of
from scope_runners.serve.sessions import Sessions
from scope_runners.serve.settings import ServeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleServer:
    port: int
    sessions: Sessions

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **headers: str) -> httpx.Client:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.Client(base_url=self.url, headers=names, timeout=30)

    def connect(self) -> socket.socket:
        end = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        end.settimeout(30)
        return end


@contextmanager
def idle_server(settings: ServeSettings) -> Iterator[IdleServer]:
    sessions = Sessions(settings)
    sessions.open()
    server = uvicorn_of(create_app(sessions), settings)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield IdleServer(port=listener.getsockname()[1], sessions=sessions)
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


def idle_settings(folder: Path, **changes: object) -> ServeSettings:
    """With "json" uvicorn leaves the loggers of the test's process as they are."""
    return ServeSettings(folder=folder, log_format="json", **changes)  # type: ignore[arg-type]
