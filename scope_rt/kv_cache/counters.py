"""What was done to a cache is counted exactly, by the cache itself."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """What was done to a cache since it was made: exact, and never switched off."""

    rows_written: int = 0
    """Tokens times layers, every overwrite included."""
    rows_read: int = 0
    """Tokens times layers that `view` showed."""
    advances: int = 0
    rows_evicted: int = 0
    """Tokens times layers that `keep`, or a full ring, dropped."""
    prefix_hits: int = 0
    """Tokens that were found computed."""
    gathers: int = 0
    """Views that had to copy rows together; a zero-copy view counts nothing."""
