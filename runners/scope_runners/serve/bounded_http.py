"""A connection that sends no whole request in time is closed: many slow ones do not use up what the
server may have open."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 15.0
"""Within this, of the connection or of the answer before, a request's head must have come whole."""


class BoundedHttp(H11Protocol):
    """As uvicorn speaks HTTP/1.1, whose own limit ends with a request's first byte."""

    _closer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        answering = self.cycle
        super().handle_events()
        if self.cycle is not answering:
            self._expect_nothing()

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._expect_nothing()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        self._expect()
        super().on_response_complete()  # which may begin the next request

    def _expect(self) -> None:
        self._expect_nothing()
        self._closer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _expect_nothing(self) -> None:
        if self._closer is not None:
            self._closer.cancel()
            self._closer = None
