"""A request reaches a route only from whom the server is for: by host, origin and token, at a rate,
with a body that has a bound."""

import asyncio
import hmac
import math
from collections.abc import Callable
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scope_runners.serve.rates import ClientRates, Rate
from scope_runners.serve.request_body import BoundedBody, check_declared
from scope_runners.serve.settings import LOCAL_HOSTS, ServeSettings

COOKIE = "scope_serve"
_COOKIE_S = 30 * 24 * 3600
_OPEN = ("/healthz", "/readyz")
"""Of probes, which carry no token."""
_SAFE = ("GET", "HEAD", "OPTIONS")
_UPLOADS = ("/input",)
"""Ends of paths whose bodies are files."""
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
        "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def secured(app: ASGIApp, settings: ServeSettings) -> ASGIApp:
    """The application behind all that guards it; pages of `settings.origins` may use it too."""
    guarded: ASGIApp = Guard(app, settings)
    if not settings.origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=settings.origins,
        allow_methods=("GET", "POST", "PATCH", "DELETE"),
        allow_headers=("authorization", "content-type"),
        expose_headers=("location", "retry-after"),
    )


class Guard:
    """Used on one event loop."""

    def __init__(
        self, app: ASGIApp, settings: ServeSettings, *, clock: Callable[[], float] | None = None
    ) -> None:
        self._app, self._settings = app, settings
        per_s = settings.requests_per_s
        self._rates = ClientRates(per_s) if clock is None else ClientRates(per_s, clock=clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it; what is refused is answered here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        send = _with_headers(send, has_page_of_others=bool(self._settings.origins))
        try:
            answer = self._answer(connection)
        except HTTPException as error:
            answer = JSONResponse({"detail": error.detail}, error.status_code, error.headers)
        if answer is not None:
            await answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._app(scope, _paced(receive, Rate(self._settings.requests_per_s)), send)
        else:
            body = BoundedBody(receive, most_bytes=self._most_bytes(scope["path"]))
            await self._app(scope, body, _noting(send, body))

    def _answer(self, connection: HTTPConnection) -> Response | None:
        """What this request is answered with before any route sees it; None lets it pass.

        Raises:
            HTTPException: it is refused.
        """
        path = connection.scope["path"]
        self._check_rate(connection)
        self._check_host(connection.headers)
        self._check_origin(connection)
        if connection.scope["type"] == "http":
            check_declared(connection.headers, most_bytes=self._most_bytes(path))
        if not self._settings.token or path in _OPEN:
            return None
        if path == "/" and "token" in connection.query_params:
            return self._signed_in(connection)
        self._check_token(connection)
        return None

    def _most_bytes(self, path: str) -> int:
        is_upload = path.endswith(_UPLOADS)
        return self._settings.max_upload_bytes if is_upload else self._settings.max_body_bytes

    def _check_rate(self, connection: HTTPConnection) -> None:
        wait_s = self._rates.take(connection.client.host if connection.client else "")
        if wait_s:
            headers = {"retry-after": str(math.ceil(wait_s))}
            raise HTTPException(
                429,
                f"more than {self._settings.requests_per_s:g} requests a second; ask less often",
                headers,
            )

    def _check_host(self, headers: Headers) -> None:
        """Without a token, a name that another page's owner points at this machine is refused."""
        host = headers.get("host", "")
        if not self._settings.token and _hostname(host) not in LOCAL_HOSTS:
            raise HTTPException(
                403, f"Host {host[:64]!r}: ask for localhost, or start the server with a --token"
            )

    def _check_origin(self, connection: HTTPConnection) -> None:
        """Only the server's own pages, and those of `settings.origins`, may have a browser ask."""
        headers, origin = connection.headers, connection.headers.get("origin")
        is_allowed = origin in self._settings.origins
        # A proxy in front may speak TLS, and this server not: hosts are compared, not schemes.
        if origin is not None and not is_allowed and _netloc(origin) != headers.get("host"):
            is_unsafe = connection.scope["type"] == "websocket"
            is_unsafe = is_unsafe or connection.scope["method"] not in _SAFE
            if is_unsafe:
                raise HTTPException(
                    403, f"Origin {origin[:64]!r} is not this server's; allow it by --origin"
                )
        site = headers.get("sec-fetch-site", "none")
        is_own = site in ("same-origin", "none") or headers.get("sec-fetch-mode") == "navigate"
        if not is_own and not is_allowed and _netloc(origin or "") != headers.get("host"):
            raise HTTPException(403, "a page of another origin asks; allow it by --origin")

    def _check_token(self, connection: HTTPConnection) -> None:
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _is_same(given.strip(), self._settings.token):
            return
        if _is_same(connection.cookies.get(COOKIE, ""), self._cookie):
            return
        raise HTTPException(
            401,
            "send Authorization: Bearer TOKEN, or open /?token=TOKEN once in a browser",
            {"www-authenticate": "Bearer"},
        )

    def _signed_in(self, connection: HTTPConnection) -> Response:
        """The page's address without the token, and a cookie in its place."""
        query = parse_qsl(connection.scope["query_string"].decode("latin-1"))
        given = [value for name, value in query if name == "token"]
        if not _is_same(given[0] if given else "", self._settings.token):
            raise HTTPException(401, "the token in this address is not the server's")
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        answer = RedirectResponse(f"/?{rest}" if rest else "/", 303, {"cache-control": "no-store"})
        is_tls = connection.scope["scheme"] in ("https", "wss")
        answer.set_cookie(
            COOKIE,
            self._cookie,
            max_age=_COOKIE_S,
            httponly=True,
            samesite="lax",
            secure=is_tls,
        )
        return answer

    @property
    def _cookie(self) -> str:
        """Not the token itself: any token makes a valid cookie, and no browser keeps the token."""
        return hmac.digest(self._settings.token.encode(), b"cookie", "sha256").hex()


def _is_same(given: str, known: str) -> bool:
    """Takes as long whatever is given."""
    return hmac.compare_digest(given.encode(errors="replace"), known.encode())


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _with_headers(send: Send, *, has_page_of_others: bool) -> Send:
    async def sent(message: Message) -> None:
        if message["type"].endswith("http.response.start"):
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            if has_page_of_others:
                headers["cross-origin-resource-policy"] = "cross-origin"
        await send(message)

    return sent


def _noting(send: Send, body: BoundedBody) -> Send:
    async def sent(message: Message) -> None:
        body.is_answered = True
        await send(message)

    return sent


def _paced(receive: Receive, rate: Rate) -> Receive:
    """Messages of a WebSocket that floods wait; TCP then holds the sender up."""

    async def received() -> Message:
        message = await receive()
        while message["type"] == "websocket.receive" and (wait_s := rate.take()):
            await asyncio.sleep(wait_s)
        return message

    return received
