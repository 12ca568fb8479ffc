"""The states that a person is told of a session; no other word is used for them."""

from enum import StrEnum


class SessionState(StrEnum):
    """What a person is told of a session."""

    STARTING = "starting"
    LIVE = "live"
    PAUSED = "paused"
    RECOVERING = "recovering"
    """A rank was lost; the stream goes on by itself."""
    DEGRADED = "degraded"
    """Slower than its own frames a second."""
    STOPPED = "stopped"
    FAILED = "failed"
