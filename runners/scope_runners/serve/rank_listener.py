"""Ranks find their session by its id; whatever one of their connections does, the next is accepted,
and a session that cannot be followed says so."""

import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from scope_contracts.errors import LinkError, ScopeError
from scope_runners.serve.journal import JournalError
from scope_runners.serve.messages import End, Hello, Role
from scope_runners.serve.session import LiveSession
from scope_runners.serve.wire import Connection

_RETRY_S = 0.2
_BACKLOG = 64
_LOG = logging.getLogger(__name__)


class RankListener:
    """Where launchers and ranks of all sessions connect."""

    def __init__(self, path: Path, find: Callable[[str], LiveSession | None]) -> None:
        """Takes `path` from a server that was killed; nobody is accepted yet. `find` gives the
        session of an id."""
        self._path, self._find = path, find
        self._has_ended = threading.Event()
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen(_BACKLOG)

    def start(self) -> None:
        """Accept who connects, on threads of their own."""
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        """Accept nobody more; who is connected stays so."""
        self._has_ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._has_ended.is_set():
            try:
                end, _ = self._listener.accept()
            except OSError as error:
                if not self._has_ended.wait(_RETRY_S):
                    _LOG.error("ranks cannot connect for now (%s)", error.strerror)
                continue
            threading.Thread(target=self._serve, args=(Connection(end),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            hello, _ = connection.receive()
            if not isinstance(hello, Hello):
                raise LinkError(f"a connection begins with a hello, not {type(hello).__name__}")
            session = self._find(hello.session_id)
            if session is None:
                connection.send(End())  # nobody will ever take what it streams
                raise LinkError(f"there is no session {hello.session_id}")
            _follow(session, hello, connection)
        except LinkError as error:
            _LOG.info("%s", error)
        finally:
            connection.close()


def _follow(session: LiveSession, hello: Hello, connection: Connection) -> None:
    """Until the connection is gone, which raises `LinkError`; all else ends the session by name."""
    try:
        if hello.role is Role.LAUNCHER:
            session.serve_launcher(connection, hello.pid)
        else:
            session.serve_rank0(connection)
    except LinkError:
        raise
    except JournalError as error:
        session.give_up_by(error)
    except Exception as error:  # noqa: BLE001 - a stream that stands still in silence
        _LOG.exception("session %s cannot be followed", session.record.id)
        session.give_up_by(ScopeError(f"the server failed ({error!r}); see its log"))
