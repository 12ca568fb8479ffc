"""Messages leave in order on a thread of their own: whoever sends may hold the locks of a session,
and waits for no process that reads slowly, or is stopped."""

import logging
import threading
from collections import deque

from scope_contracts.errors import LinkError
from scope_runners.serve.messages import Message
from scope_runners.serve.wire import Connection

MOST_WAITING = 1024
"""Messages that the other side may be behind before it counts as gone."""
_LOG = logging.getLogger(__name__)


class Outbox:
    """Of one connection, which it ends; any thread may use it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Message, bytes]] = deque()
        self._is_closed = False
        threading.Thread(target=self._send_all, name="outbox", daemon=True).start()

    def put(self, message: Message, body: bytes = b"") -> None:
        """Send it soon; never blocks. What cannot be sent ends the connection."""
        with self._changed:
            is_stuck = len(self._waiting) >= MOST_WAITING
            if not (is_stuck or self._is_closed):
                self._waiting.append((message, body))
                self._changed.notify_all()
        if is_stuck:
            _LOG.warning("rank0 has not read %d messages", MOST_WAITING)
            self.close()

    def close(self) -> None:
        """Send nothing more, what waits included, and end the connection. Idempotent."""
        self._stop()
        self._connection.close()

    def _stop(self) -> None:
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _send_all(self) -> None:
        try:
            while (sent := self._next()) is not None:
                self._connection.send(*sent)
        except LinkError as error:
            _LOG.info("%s", error)
            self._stop()  # its reader has still to read what rank0 said last
        except Exception:  # noqa: BLE001 - rank0 would wait for what never comes
            _LOG.exception("a message to rank0 cannot be sent")
            self.close()

    def _next(self) -> tuple[Message, bytes] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return None if self._is_closed else self._waiting.popleft()
