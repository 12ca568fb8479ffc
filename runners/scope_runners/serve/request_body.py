"""A request's body has a size and a time within which it is there; no route reads more, or waits
longer."""

import asyncio
from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

BODY_S = 30.0
"""Within this a whole body must have come."""
_BYTES_PER_S = 2**18
"""The least speed of a larger one."""


def check_declared(headers: Mapping[str, str], *, most_bytes: int) -> None:
    """Raises a 413 or a 400: what a request says of its body."""
    declared = headers.get("content-length", "0")
    if not (declared.isascii() and declared.isdigit()):
        raise HTTPException(400, "Content-Length: give a number of bytes")
    if len(declared) > 19 or int(declared) > most_bytes:
        raise _too_large(most_bytes)


class BoundedBody:
    """What a route receives of a request, called as ASGI's `receive`."""

    def __init__(self, receive: Receive, *, most_bytes: int) -> None:
        self._receive, self._most_bytes = receive, most_bytes
        self._num_bytes, self._is_whole = 0, False
        self._deadline_s = asyncio.get_running_loop().time() + max(
            BODY_S, most_bytes / _BYTES_PER_S
        )
        self.is_answered = False
        """Whether the answer has begun: what comes late then is no error of the answer."""

    async def __call__(self) -> Message:
        """Raises a 413 or a 408 until the body is whole."""
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline_s):
                message = await self._receive()
        except TimeoutError:
            if self.is_answered:
                return {"type": "http.disconnect"}
            raise HTTPException(408, "the body did not come in time; send it faster") from None
        return self._counted(message)

    def _counted(self, message: MutableMapping[str, Any]) -> Message:
        if message["type"] == "http.request":
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self._most_bytes:
                raise _too_large(self._most_bytes)
            self._is_whole = not message.get("more_body", False)
        else:
            self._is_whole = True
        return message


def _too_large(most_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is too large; send {most_bytes} bytes or fewer")
