"""One process serves: it holds no model and no weights, so that no crash of a rank is its own."""

import logging
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from scope_contracts.errors import UserInputError
from scope_runners.serve.api import create_app
from scope_runners.serve.bounded_http import HEAD_S, BoundedHttp
from scope_runners.serve.events import Event
from scope_runners.serve.first_session import FirstSession, own_sessions
from scope_runners.serve.security import secured
from scope_runners.serve.session_log import log_event
from scope_runners.serve.sessions import Sessions
from scope_runners.serve.settings import ServeSettings
from scope_runners.serve.tracing import Tracing, open_tracing

_LOG = logging.getLogger(__name__)
_END_S = 5
_BACKLOG = 128
_MOST_CONNECTIONS = 512
"""Half of what a process may usually have open."""


def serve(settings: ServeSettings, *, prompt: str | None, stream: Mapping[str, Any]) -> int:
    """Serve until SIGINT or SIGTERM, then end all sessions in order.

    Raises:
        UserInputError: the address is taken, or the session of the command cannot be streamed.
    """
    listener = _listening(settings)
    tracing = open_tracing(settings.trace) if settings.trace else None
    sessions = Sessions(settings, observe=_observer(tracing))
    app = create_app(sessions, on_end=tracing.close if tracing is not None else lambda: None)
    server = uvicorn_of(app, settings)
    first = FirstSession(sessions, end=partial(setattr, server, "should_exit", True))
    sessions.open()
    if prompt is not None:
        first.open(prompt, stream)
    _publish(sessions, settings.publish)
    host, port = listener.getsockname()[:2]
    print(f"scope-rt: http://{host}:{port}/", file=sys.stderr, flush=True)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _ended)  # uvicorn raises what it obeyed once more at its end
    server.run(sockets=[listener])
    if first.refusal:
        raise UserInputError(first.refusal)
    return 0


def _publish(sessions: Sessions, urls: Sequence[str]) -> None:
    own = own_sessions(sessions)
    if urls and not own:
        _LOG.error("no session is published: the folder has none that the command started")
    for url in urls if own else ():
        own[0].stage.publications.begin(url)


def uvicorn_of(app: FastAPI, settings: ServeSettings) -> uvicorn.Server:
    """What listens for `app`, with all that guards it."""
    config = uvicorn.Config(
        secured(app, settings),
        http=BoundedHttp,
        limit_concurrency=_MOST_CONNECTIONS,
        log_config=None if settings.log_format == "json" else LOGGING_CONFIG,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=int(HEAD_S),
        timeout_graceful_shutdown=_END_S,
        h11_max_incomplete_event_size=2**16,
        ws_max_size=2**16,
        server_header=False,
    )
    return uvicorn.Server(config)


def _observer(tracing: Tracing | None) -> Callable[[str, Event], None]:
    def observe(session_id: str, event: Event) -> None:
        log_event(session_id, event)
        if tracing is not None:
            tracing.observe(session_id, event)

    return observe


def _ended(signum: int, frame: FrameType | None) -> None: ...


def _listening(settings: ServeSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)  # who reads the address below may connect at once
    except OSError as error:
        listener.close()
        raise UserInputError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}); give another "
            "--port, or end what listens there"
        ) from error
    return listener
