"""How much a stream spends on finding what was computed wrong."""

from enum import StrEnum


class IntegrityLevel(StrEnum):
    """What is verified, and before or after a chunk is shown."""

    OFF = "off"
    """The contract alone: plans and settings, not numbers."""
    DEFAULT = "default"
    """Values and replicated results before a chunk is shown; state and arithmetic in rotation."""
    STRICT = "strict"
    """All state and the arithmetic of every layer, before a chunk is shown."""
