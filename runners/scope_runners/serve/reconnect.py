"""A process of a session finds its server again: it asks for it until it is back, or has been away
for too long."""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from scope_contracts.errors import LinkError
from scope_runners.serve.messages import Hello, Message, Role
from scope_runners.serve.wire import Connection, connect

ORPHAN_S = 60.0
_RETRY_S = 0.2
_LOG = logging.getLogger(__name__)


class Reconnecting:
    """A connection to the server of a session, and its receiving thread."""

    def __init__(
        self,
        path: Path,
        session_id: str,
        *,
        on_connected: Callable[[Connection], None],
        on_message: Callable[[Connection, Message, bytearray], None],
        on_lost: Callable[[], None],
        on_failed: Callable[[Exception], None],
        role: Role = Role.RANK0,
    ) -> None:
        """`on_connected` is called first with each connection, then `on_message` with what comes;
        `on_lost` once no server was there for `patience_s`, `on_failed` with what one of the others
        raised: nothing more comes."""
        self.patience_s = ORPHAN_S
        self._path = path
        self._hello = Hello(role=role, session_id=session_id, pid=os.getpid())
        self._on_connected, self._on_message = on_connected, on_message
        self._on_lost, self._on_failed = on_lost, on_failed
        self._connection: Connection | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    @property
    def is_connected(self) -> bool:
        """Whether a server is there now, as far as is known."""
        return self._connection is not None

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def send(self, message: Message, body: bytes = b"") -> None:
        """Send it to a server that is there; else it is not sent."""
        connection = self._connection
        if connection is not None:
            try:
                connection.send(message, body)
            except LinkError as error:
                _LOG.info("%s", error)

    def close(self) -> None:
        """Disconnect for good."""
        self._is_closed.set()
        connection = self._connection
        if connection is not None:
            connection.close()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            self._stay_connected()
        except Exception as error:  # noqa: BLE001 - who waits for a server would wait for ever
            _LOG.exception("the connection to the server has failed")
            self._on_failed(error)

    def _stay_connected(self) -> None:
        gone_since_s = time.monotonic()
        while not self._is_closed.is_set():
            try:
                connection = connect(self._path)
            except OSError:
                pass  # nobody listens yet
            else:
                self._serve(connection)
                gone_since_s = time.monotonic()
            if time.monotonic() - gone_since_s > self.patience_s:
                _LOG.warning("the server of this session is gone for %g s", self.patience_s)
                self._on_lost()
                return
            self._is_closed.wait(_RETRY_S)

    def _serve(self, connection: Connection) -> None:
        """Until it is gone."""
        try:
            connection.send(self._hello)
            self._on_connected(connection)
            self._connection = connection
            while True:
                message, body = connection.receive()
                self._on_message(connection, message, body)
        except LinkError as error:
            if not self._is_closed.is_set():
                _LOG.warning("the server of this session: %s", error)
        finally:
            self._connection = None
            connection.close()
