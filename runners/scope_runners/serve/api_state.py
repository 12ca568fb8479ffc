"""What routes share: the session that a request names, its viewers, and its commands."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import HTTPException
from starlette.concurrency import run_in_threadpool

from scope_runners.serve.commands import posted
from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.media.webrtc import Peers
from scope_runners.serve.messages import CommandKind
from scope_runners.serve.receipts import Receipt
from scope_runners.serve.session import LiveSession
from scope_runners.serve.sessions import Sessions

_LOOK_S = 0.02
_KINDS = ", ".join(each for each in CommandKind if each is not CommandKind.SCHEDULE)
"""That a client may post; a schedule is several prompts."""
_MOST_WAITING = 64
"""Requests that wait for a command's answer; those beyond are told that it is pending."""


class Api:
    """The routes, over the sessions of one server."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.peers: dict[str, Peers] = {}
        self._num_waiting = 0

    @property
    def most_listeners(self) -> int:
        """Clients that may hear the events of one session."""
        return 2 * self.sessions.settings.max_viewers

    def session(self, session_id: str) -> LiveSession:
        """Raises a 404."""
        session = self.sessions.get(session_id)
        if session is None:
            raise HTTPException(404, f"there is no session {session_id[:64]!r}; list /v1/sessions")
        return session

    def hub(self, session_id: str) -> MediaHub:
        """Raises a 404, or a 409 where nothing is shown yet."""
        hub = self.session(session_id).hub
        if hub is None:
            raise HTTPException(409, "nothing is shown yet; try again once the session is live")
        return hub

    def peers_of(self, session_id: str) -> Peers:
        """The WebRTC viewers of a session."""
        if session_id not in self.peers:
            self.peers[session_id] = Peers(self.sessions.settings.ice_servers)
        return self.peers[session_id]

    async def post(self, session: LiveSession, command: Any, wait_s: float) -> Receipt:
        """Post a command and wait for its answer, `wait_s` at most."""
        kind, fields, command_id, in_chunks = posted(command)
        receipt = await run_in_threadpool(
            session.post, kind, fields, command_id=command_id, in_chunks=in_chunks
        )
        if receipt.at_chunk >= 0 or self._num_waiting >= _MOST_WAITING:
            return receipt
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        self._num_waiting += 1
        try:
            while receipt.is_open and loop.time() < deadline_s:
                await asyncio.sleep(_LOOK_S)
                receipt = session.receipts.get(receipt.id) or receipt
        finally:
            self._num_waiting -= 1
        return receipt


def first_wrong(errors: Sequence[Any]) -> str:
    """Without what was given: it may be a secret, or no text."""
    first = errors[0]
    names = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    about = first.get("ctx", {})
    match first["type"]:
        case "json_invalid":
            return f"the request is not JSON ({about['error']}); send one JSON object"
        case "union_tag_not_found":
            names, what = [*names, "kind"], f"is missing; give one of {_KINDS}"
        case "union_tag_invalid":
            names, what = [*names, "kind"], f"is not known; give one of {_KINDS}"
        case "missing":
            what = "is missing; add it"
        case "extra_forbidden":
            what = "is not known; leave it out"
        case "model_attributes_type" | "model_type" | "dict_type":
            what = "must be a JSON object"
        case "string_too_short":
            what = "is empty; fill it in"
        case "string_too_long":
            what = f"is too long; give {about['max_length']} characters or fewer"
        case "string_pattern_mismatch":
            what = "has other characters than letters, digits, '-' and '_'; leave them out"
        case _:
            what = first["msg"].replace("Input should be a valid", "must be a")
            what = what.replace("Input should be", "must be")
    return f"{'.'.join(names) or 'the request'}: {what}"
