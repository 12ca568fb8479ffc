"""Whoever is not meant to reach the server is refused, in one sentence, before any route runs."""

import json
import socket
import time
from collections.abc import Iterator

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from scope_runners.serve import bounded_http, request_body
from scope_runners.serve.rates import MOST_CLIENTS, ClientRates
from tests.serve.idle_server import IdleServer, idle_server, idle_settings

TOKEN = "a-token-of-this-test"
OTHER = "https://app.example.org"
SESSIONS = "/v1/sessions"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdleServer]:
    folder = tmp_path_factory.mktemp("local")
    with idle_server(idle_settings(folder, requests_per_s=1e6, max_body_bytes=4096)) as server:
        yield server


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdleServer]:
    """With a token, and a page of another origin that may use it."""
    folder = tmp_path_factory.mktemp("closed")
    settings = idle_settings(folder, token=TOKEN, origins=(OTHER,), requests_per_s=1e6)
    with idle_server(settings) as server:
        yield server


def answer_to(server: IdleServer, request: bytes) -> bytes:
    """What the server answers to these bytes until it closes, or has said all of a head."""
    with server.connect() as end:
        end.sendall(request)
        answer = b""
        while b"\r\n\r\n" not in answer and (more := end.recv(65536)):
            answer += more
    return answer


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"cookie": "scope_serve=1"}],
)
@pytest.mark.parametrize("path", ["/", SESSIONS, "/metrics", "/openapi.json", "/static/app.js"])
def test_nothing_is_served_without_the_token(
    closed: IdleServer, path: str, headers: dict[str, str]
) -> None:
    with closed.client(**headers) as client:
        answer = client.get(path)
    assert answer.status_code == 401
    assert "Bearer" in answer.json()["detail"]
    assert TOKEN not in answer.text


def test_a_token_of_any_bytes_is_compared_and_not_an_error(closed: IdleServer) -> None:
    for given in (b"\xff\xfe", "\u00e9".encode(), b"x" * 8000):
        request = b"GET /v1/sessions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        assert b" 401 " in answer_to(closed, request + given + b"\r\n\r\n")


def test_the_token_opens_everything_and_probes_need_none(closed: IdleServer) -> None:
    with closed.client(authorization=f"Bearer {TOKEN}") as client:
        assert client.get(SESSIONS).json() == []
    with closed.client() as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 200


def test_a_browser_changes_the_token_for_a_cookie_that_is_not_the_token(
    closed: IdleServer,
) -> None:
    with closed.client() as client:
        refused = client.get("/?token=wrong")
        assert refused.status_code == 401
        entered = client.get(f"/?session=9a&token={TOKEN}")
        assert entered.status_code == 303
        assert entered.headers["location"] == "/?session=9a"
        cookie = entered.headers["set-cookie"]
        assert TOKEN not in cookie
        assert "HttpOnly" in cookie
        assert "samesite=lax" in cookie.lower()
        assert client.get(SESSIONS).status_code == 200
        assert client.get("/").headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://["]
)
def test_a_page_of_another_origin_changes_nothing(local: IdleServer, origin: str) -> None:
    with local.client(origin=origin) as client:
        for method, path in (("POST", SESSIONS), ("DELETE", f"{SESSIONS}/x")):
            answer = client.request(method, path, json={"prompt": "a red circle"})
            assert answer.status_code == 403
            assert "--origin" in answer.json()["detail"]
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"ws://127.0.0.1:{local.port}{SESSIONS}/x/events", origin=origin)


def test_a_page_of_another_origin_embeds_nothing(local: IdleServer) -> None:
    embedding = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}
    with local.client(**embedding) as client:
        assert client.get(f"{SESSIONS}/x/stream.mjpeg").status_code == 403
    with local.client(sec_fetch_site="cross-site", sec_fetch_mode="navigate") as client:
        assert client.get("/").status_code == 200, "a link to the page is no attack"


def test_the_servers_own_page_and_an_allowed_one_may_ask(closed: IdleServer) -> None:
    bearer = {"authorization": f"Bearer {TOKEN}"}
    for origin in (closed.url, OTHER):
        with closed.client(origin=origin, **bearer) as client:
            assert client.delete(f"{SESSIONS}/x").status_code == 404, origin
    with closed.client(origin=OTHER, access_control_request_method="POST") as client:
        answer = client.options(SESSIONS)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == OTHER


def test_a_name_that_is_pointed_at_this_machine_is_refused(local: IdleServer) -> None:
    with local.client(host="rebound.example") as client:
        answer = client.get(SESSIONS)
    assert answer.status_code == 403
    assert "rebound.example" in answer.json()["detail"]
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
        with local.client(host=host) as client:
            assert client.get(SESSIONS).status_code == 200


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(local: IdleServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield from [b"x" * 1024] * 8

    with local.client(content_type="application/json") as client:
        said = client.post(SESSIONS, content=b"x" * 5000)
        unsaid = client.post(SESSIONS, content=pieces())
    assert (said.status_code, unsaid.status_code) == (413, 413)
    assert "4096" in unsaid.json()["detail"]


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(local: IdleServer) -> None:
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
    answer = answer_to(local, head)
    assert b" 413 " in answer.split(b"\r\n")[0], answer


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": ' + b"[" * 2000,
        b'{"prompt": "a", "config": {"seed": ' + b"9" * 3000 + b"}}",
        b'{"prompt": "a", "config": {"": 1}}',
        b'{"prompt": "a", "config": {"cls": 1, "self": 2}}',
        b'{"prompt": "a", "lease_s": Infinity}',
        b'{"prompt": "  "}',
    ],
)
def test_a_malformed_body_is_refused_in_a_sentence(local: IdleServer, body: bytes) -> None:
    with local.client(content_type="application/json") as client:
        answer = client.post(SESSIONS, content=body)
    assert answer.status_code in (400, 422), answer.text
    assert isinstance(answer.json()["detail"], str)
    assert not list(local.sessions.settings.sessions.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "/etc"),
        ("model", "../.."),
        ("recipe", "/etc/passwd"),
        ("recipe", "../x.toml"),
        ("recipe", "x.toml"),
        ("log", "/tmp/x"),
        ("snapshot", "/tmp/x"),
        ("image", "/etc/hostname"),
        ("tp", 1000),
        ("height", 4096),
        ("width", 2**40),
    ],
)
def test_a_client_names_no_file_and_takes_no_machine(
    local: IdleServer, name: str, value: object
) -> None:
    with local.client() as client:
        answer = client.post(SESSIONS, json={"prompt": "a red circle", "config": {name: value}})
    assert answer.status_code == 422
    assert name in answer.json()["detail"]
    assert not list(local.sessions.settings.sessions.iterdir())


@pytest.mark.parametrize(
    "path",
    [
        "/static/../api.py",
        "/static/..%2fapi.py",
        "/static/%2e%2e/api.py",
        "/static//etc/passwd",
        "/static/..\\api.py",
        "/v1/sessions/..%2f..%2fserver.lock",
        "/v1/sessions/x/recordings/..%2f..%2frecord.json",
        "/v1/sessions/x/recordings/%00",
    ],
)
def test_no_path_leads_out_of_its_folder(local: IdleServer, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    answer = answer_to(local, request)
    assert b" 404 " in answer.split(b"\r\n")[0], answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_bytes_that_are_no_request_are_refused(local: IdleServer, request_bytes: bytes) -> None:
    answer = answer_to(local, request_bytes)
    assert b" 4" in answer.split(b"\r\n")[0], answer


def test_a_head_without_end_is_refused(local: IdleServer) -> None:
    sent = 0
    with local.connect() as end, pytest.raises(OSError, match=r"reset|pipe"):
        end.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
        while sent < 2**26:
            end.sendall(b"a" * 2**16)
            sent += 2**16


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_connection_that_sends_no_whole_head_is_closed(
    local: IdleServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_S", 0.5)
    with local.connect() as end:
        end.sendall(sent)
        assert is_closed_while_it_drips(end)


def test_a_connection_is_closed_that_drips_after_an_answer(
    local: IdleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_S", 0.5)
    with local.connect() as end:
        end.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in end.recv(65536)
        assert is_closed_while_it_drips(end)


def test_a_body_that_drips_is_given_up(local: IdleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_S", 0.5)
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n"
    answer = answer_to(local, head + b"Content-Type: application/json\r\n\r\n{")
    assert b" 408 " in answer.split(b"\r\n")[0], answer


def test_a_client_that_floods_is_told_when_to_ask_again_and_others_are_served() -> None:
    now_s = 0.0
    rates = ClientRates(10, clock=lambda: now_s)
    assert sum(rates.take("10.0.0.1") == 0 for _ in range(100)) == 40, "a burst of 4 seconds"
    assert rates.take("10.0.0.1") == pytest.approx(0.1)
    assert rates.take("10.0.0.2") == 0
    now_s = 0.1001
    assert rates.take("10.0.0.1") == 0
    assert rates.take("10.0.0.1") > 0
    assert sum(rates.take(f"2001:db8::{number:x}") == 0 for number in range(100)) == 40
    for number in range(2 * MOST_CLIENTS):
        rates.take(f"172.16.{number // 256}.{number % 256}")
    assert len(rates) == MOST_CLIENTS


def test_a_flood_of_requests_is_refused_and_not_served(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    settings = idle_settings(tmp_path_factory.mktemp("flood"), requests_per_s=1.0)
    with idle_server(settings) as server, server.client() as client:
        answers = [client.get(SESSIONS) for _ in range(12)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) >= 4
    assert int(refused[0].headers["retry-after"]) >= 1


def test_no_answer_can_be_framed_or_guessed_at(local: IdleServer) -> None:
    with local.client() as client:
        for path in ("/", SESSIONS, "/static/app.js", "/v1/none"):
            headers = client.get(path).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert client.get("/docs").status_code == 404, "it loads scripts of others"


def test_the_schema_says_what_a_refusal_looks_like(local: IdleServer) -> None:
    with local.client() as client:
        schema = client.get("/openapi.json").json()
    refusal = schema["paths"][SESSIONS]["post"]["responses"]["422"]
    assert "Problem" in json.dumps(refusal)


def is_closed_while_it_drips(end: socket.socket) -> bool:
    """Whether the server closes, though a byte comes now and then."""
    end.settimeout(0.05)
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        try:
            end.sendall(b"a")
            if not end.recv(4096):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False
