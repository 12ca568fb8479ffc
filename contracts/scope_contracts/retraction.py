"""A retraction names the chunks that were shown and may be wrong, so that nobody keeps them.

How far back it goes follows from the detector that found the error: from the chunk after the last
one that it has looked at in the same way.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraction:
    """Chunks `first_chunk` to `last_chunk` of the epochs `first_epoch` to `last_epoch` are suspect:
    they were shown after the last good check.

    A chunk that is made in place of one of them has the same index and a later epoch.
    """

    first_chunk: int
    last_chunk: int
    first_epoch: int
    last_epoch: int
    reason: str
    """What was found, with the rank where it is known."""

    def followed_by(self, later: "Retraction") -> "Retraction":
        """Both as one; this one is of older chunks."""
        return replace(self, last_chunk=later.last_chunk, last_epoch=later.last_epoch)

    def covers(self, chunk_index: int, cache_epoch: int) -> bool:
        """Whether this chunk is retracted."""
        is_in_epochs = self.first_epoch <= cache_epoch <= self.last_epoch
        return is_in_epochs and self.first_chunk <= chunk_index <= self.last_chunk
