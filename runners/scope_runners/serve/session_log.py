"""What happens to a session is logged once, from its events; no line holds a prompt."""

import logging
from collections.abc import Mapping
from typing import Any

from scope_runners.serve.session_states import SessionState

_LOG = logging.getLogger(__name__)
_LEVELS = {
    SessionState.RECOVERING: logging.WARNING,
    SessionState.DEGRADED: logging.WARNING,
    SessionState.FAILED: logging.ERROR,
}
_OF_PUBLICATIONS = {"retrying": logging.WARNING, "failed": logging.ERROR}


def log_event(session_id: str, event: Mapping[str, Any]) -> None:
    """Log one event of a session; figures that come every second are left to the metrics."""
    match event["type"]:
        case "state":
            state, detail = event["session"]["state"], event["session"]["detail"]
            chunk, epoch = event["session"]["chunk_index"], event["session"]["cache_epoch"]
            level = _LEVELS.get(SessionState(state), logging.INFO)
            _say(level, session_id, f"{state}: {detail}", chunk=chunk, epoch=epoch)
        case "rank":
            rank, level = event["rank"], logging.INFO
            if event["state"] == "lost":
                level = logging.WARNING
            _say(level, session_id, event["detail"], rank=rank)
        case "chunk":
            chunk, epoch = event["chunk_index"], event["cache_epoch"]
            said = f"chunk {chunk} (epoch {epoch}): {event['num_frames']} frames"
            _say(logging.INFO, session_id, said, chunk=chunk, epoch=epoch)
        case "receipt":
            receipt = event["receipt"]
            said = f"command {receipt['id']} ({receipt['kind']}): {receipt['state']}"
            chunk, epoch = receipt["chunk_index"], receipt["cache_epoch"]
            _say(logging.INFO, session_id, said, chunk=chunk, epoch=epoch)
        case "retracted":
            first, last = event["first_chunk"], event["last_chunk"]
            said = f"chunks {first} to {last} are retracted: {event['reason']}"
            _say(logging.ERROR, session_id, said, chunk=first)
        case "recording":
            said = f"recording {event['name']}: {event['state']}, {event['num_frames']} frames"
            _say(logging.INFO, session_id, said)
        case "publication":
            said = f"publication {event['id']} to {event['url']}: {event['state']}"
            level = _OF_PUBLICATIONS.get(event["state"], logging.INFO)
            _say(level, session_id, f"{said}, {event['detail']}" if event["detail"] else said)


def _say(level: int, session_id: str, message: str, **fields: int | None) -> None:
    known = {name: value for name, value in fields.items() if value is not None and value >= 0}
    _LOG.log(level, "session %s: %s", session_id, message, extra={"stream": session_id, **known})
