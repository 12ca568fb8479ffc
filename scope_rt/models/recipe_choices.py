"""What a recipe may choose between, each by its name in a file."""

from enum import StrEnum


class CacheUpkeep(StrEnum):
    """How K/V of finished chunks are made clean."""

    CLEAN_PASS = "clean_pass"
    """After the steps, one call at t=0 rewrites the window (Self-Forcing, LongLive)."""
    RECOMPUTE = "recompute"
    """Before the steps, one call at t=0 over context frames rebuilds the cache (Krea)."""


class NewText(StrEnum):
    """What a new prompt does beside taking the place of the old one's keys."""

    KEEP_CACHE = "keep_cache"
    """The past stays as it was made."""
    RECACHE = "recache"
    """The latest frames are made again under it, in one call without a mask (LongLive)."""


class RecomputeText(StrEnum):
    """Under which text a recompute runs in a chunk that has a new one."""

    CURRENT = "current"
    PREVIOUS = "previous"
    """That of the chunk before, as in Krea's own server."""


class TransitionWeights(StrEnum):
    """How far the chunks of a transition have gone, of N."""

    FROM_SOURCE = "from_source"
    """0, 1/(N-1), ..., 1: the first chunk still shows the old prompt, as in Krea's own server."""
    OFF_SOURCE = "off_source"
    """1/N, 2/N, ..., 1."""


class Positions(StrEnum):
    """Where frames are for attention."""

    IN_EPOCH = "in_epoch"
    """At their number since the epoch began; keys are cached as they were rotated."""
    IN_WINDOW = "in_window"
    """At their place among the frames in view; keys are rotated anew in each call."""
