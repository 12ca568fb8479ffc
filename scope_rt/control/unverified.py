"""What was shown, and from which chunk on an error speaks against it.

An error carries the first chunk that its detector has not vouched for (`suspect_from`). What it
found may be the effect of another change, in state that is verified in rotation: the M - 1 newest
chunks are suspect with every error (M is 1 in `strict`: what was shown is verified). A change of
memory or settings is none of an earlier process: every process verifies what it loads. What samples
find, such as a wrong kernel, may be older than this process.
"""

from scope_contracts.retraction import Retraction
from scope_rt.record.runs import Runs


class Unverified:
    """The chunks that were shown, of a stream of any length."""

    def __init__(self, within: int, *, next_chunk: int, shown: Runs | None = None) -> None:
        """`within` is M, in chunks; this process makes `next_chunk` first.

        `shown` are the chunks of this stream that earlier processes showed, with their epochs.
        """
        self._within, self._first_made = within, next_chunk
        self._last = next_chunk - 1
        self._retracted_from: int | None = None
        self._shown = shown or Runs()
        self._begun_at = self._shown.first[0] if self._shown else next_chunk

    def begin(self, next_chunk: int) -> None:
        """Another stream begins: chunks of the one before are not planned again."""
        self._begun_at, self._retracted_from = next_chunk, None

    def add_shown(self, chunk_index: int, cache_epoch: int) -> None:
        """A chunk was decoded for the consumer, and nothing was found wrong with it."""
        self._shown.add(chunk_index, cache_epoch)
        self._last = chunk_index

    def first_suspect(self, suspect_from: int | None) -> int:
        """The first chunk that an error speaks against; above all that were shown where that is
        none of them.

        None is the first of this process: its detector says nothing.
        """
        first = self._first_made if suspect_from is None else suspect_from
        # The error comes with the next chunk, or a later one.
        return min(first, max(self._first_made, self._last + 2 - self._within))

    @property
    def not_verified(self) -> range:
        """The chunks of this process that no rotation has verified yet."""
        return range(self.first_suspect(self._last + 1), self._last + 1)

    def trusts_context(self, first_suspect: int) -> bool:
        """Whether all that was shown is verified, so that the stream goes on from it."""
        return self._within == 1 and first_suspect > self._last

    def retract(self, first_suspect: int, reason: str) -> Retraction | None:
        """Of the chunks that were shown from there on; None where there are none, or where all of
        them were retracted before."""
        end = self._last + 1 if self._retracted_from is None else self._retracted_from
        suspect = self._shown.between(first_suspect, end)
        self._retracted_from = min(first_suspect, end)
        if not suspect:
            return None
        first_chunk, first_epoch = suspect.first
        last_chunk, last_epoch = suspect.last
        return Retraction(
            first_chunk=first_chunk,
            last_chunk=last_chunk,
            first_epoch=first_epoch,
            last_epoch=last_epoch,
            reason=reason,
        )

    def cut_of(self, retracted: Retraction | None) -> tuple[int, int]:
        """The chunk before which the stream continues by a hard cut, and how many chunks that its
        consumer was given are made again."""
        if retracted is None:
            return max(self._last + 1, self._begun_at), 0
        cut = max(retracted.first_chunk, self._begun_at)
        return cut, len(self._shown.between(cut, retracted.last_chunk + 1))
