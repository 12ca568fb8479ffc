"""`scope-rt top` shows what a server says, and says in one sentence that there is none."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from scope_rt.environment_names import SERVE_TOKEN
from scope_runners.main import main
from scope_runners.top import table
from tests.serve.viewed import NOT_READY_YET, stats, view


@contextmanager
def server(said: Any, *, token: str = "") -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = not token or self.headers["Authorization"] == f"Bearer {token}"
            found = self.path == "/v1/sessions"
            self.send_response(404 if not found else 200 if allowed else 401)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_a_table_has_one_line_a_session_under_its_heads(capsys: pytest.CaptureFixture[str]) -> None:
    with server([view(), view(id="9a", state="paused", viewers=50)]) as url:
        assert main(["top", url, "--once"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    shown = dict(zip(cells(head), cells(first), strict=True))
    assert shown == {
        "session": "4f0c",
        "state": "live",
        "plan": "pp1",
        "ranks": "2/2",
        "chunk": "40",
        "epoch": "2",
        "frames/s": "16.0",
        "of": "16",
        "lead s": "0.40",
        "latency p50/p95 ms": "700/900",
        "generate p95 ms": "210",
        "cache": "100% of 3 MiB",
        "viewers": "3",
        "drops": "19",
        "stalls": "2",
        "restarts": "1",
        "parity": "good",
    }
    assert dict(zip(cells(head), cells(second), strict=True))["viewers"] == "50"


def test_without_a_terminal_it_is_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    with server([]) as url:
        assert main(["top", url + "/"]) == 0
    assert capsys.readouterr().out == "no sessions\n"


def test_what_is_not_known_is_a_dash_and_what_is_wrong_is_said() -> None:
    nothing = {"p50": None, "p95": None}
    unmeasured = stats(stage_ms={}, prompt_latency_ms={**nothing, "last": None, "n": 0})
    said = view(**NOT_READY_YET) | {"stats": unmeasured, "detail": "its ranks\x1b[2J start"}
    head, line, reason = table([said])
    shown = dict(zip(cells(head), cells(line), strict=True))
    assert [shown[name] for name in ("plan", "ranks", "chunk", "of")] == ["-"] * 4
    assert shown["latency p50/p95 ms"] == "-/-"
    assert reason == "4f0c: its ranks?[2J start"


def test_a_token_is_sent_from_the_option_or_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server([], token="t0") as url:
        assert main(["top", url, "--token", "t0"]) == 0
        assert main(["top", url]) == 1
        assert capsys.readouterr().err == f"scope-rt: {url} answers 401; give its --token\n"
        monkeypatch.setenv(SERVE_TOKEN, "t0")
        assert main(["top", url]) == 0


def test_a_server_that_is_not_there_is_said_in_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with server([]) as url:
        pass
    assert main(["top", url, "--once"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"scope-rt: {url} does not answer (")
    assert said.endswith("; is scope-rt serve up?\n")
    assert said.count("\n") == 1


def test_what_speaks_no_http_is_said_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def speak(listener: socket.socket) -> None:
        end, _ = listener.accept()
        with end:
            end.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            end.recv(2**16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=speak, args=(listener,), daemon=True).start()
        assert main(["top", f"http://127.0.0.1:{listener.getsockname()[1]}", "--once"]) == 1
    assert capsys.readouterr().err.endswith("; is scope-rt serve up?\n")


@pytest.mark.parametrize("said", [{"sessions": []}, ["4f0c"], 7, [{"id": "4f0c"}]])
def test_what_is_no_server_of_ours_is_said_so(
    said: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(said) as url:
        assert main(["top", url]) == 1
    assert "does not list sessions; is it a server of scope-rt?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://[::1", "http://host:port"]
)
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url]) == 2
    assert f"{url!r} is no URL of a server" in capsys.readouterr().err
