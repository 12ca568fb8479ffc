"""After an error of integrity nobody keeps unknowingly what was shown and is not verified.

What the error speaks against is retracted in the log first, and then what is saved leads before it:
a kill in between loses neither, as whoever resumes holds the one against the other.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scope_contracts.errors import DamageError, IntegrityError, LinkError
from scope_contracts.retraction import Retraction
from scope_rt.control.log_entries import retracted_record
from scope_rt.control.unverified import Unverified
from scope_rt.record.log import Log

_LOG = logging.getLogger(__name__)


class Retracting:
    """What was retracted of one stream since it began."""

    def __init__(
        self,
        unverified: Unverified,
        log: Log,
        *,
        verify_survivors: Callable[[], tuple[int, ...]],
        save_cut: Callable[[int, int], None],
    ) -> None:
        """`save_cut` is given the chunk before which the stream continues, and how many chunks
        that its consumer was given are made again."""
        self.is_wrong = False
        """Whether an error of integrity has ended this stream."""
        self._unverified, self._log = unverified, log
        self._verify_survivors, self._save_cut = verify_survivors, save_cut
        self._retraction: Retraction | None = None

    def begin(self, next_chunk: int) -> None:
        """Another stream begins with `next_chunk`."""
        self._unverified.begin(next_chunk)
        self._retraction, self.is_wrong = None, False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """An `IntegrityError` in here retracts what it speaks against, and names it; so does what
        the ranks that are left after a loss find in what they hold."""
        try:
            yield
        except DamageError:  # of the log: no chunk is wrong
            raise
        except IntegrityError as error:
            self._retract(error)
            raise
        except LinkError as loss:
            try:
                self._look_at_survivors()
            except IntegrityError as error:
                self._retract(error)
                raise error from loss
            raise

    def _look_at_survivors(self) -> None:
        """Lost is not wrong: the cache is rebuilt from what was shown. That is made from what the
        ranks hold who are left, which they verify, and from what the lost one held.

        Raises:
            IntegrityError: a rank holds something else.
        """
        silent = self._verify_survivors()
        chunks = self._unverified.not_verified
        if silent and chunks:
            first, last = chunks[0], chunks[-1]
            _LOG.warning(
                "rank %s was lost before all that it held was verified once more; %s made "
                "meanwhile, shown and kept, as nothing speaks against them: look at them, or "
                "stream with integrity strict, which verifies each chunk before it is shown",
                ", ".join(map(str, silent)),
                f"chunk {first} was" if first == last else f"chunks {first} to {last} were",
            )

    def _retract(self, error: IntegrityError) -> None:
        """Retract what the error speaks against, and save where the stream continues without it.

        What is found as the stream ends may accuse more than the error that ends it, or the same.
        """
        self.is_wrong = True
        earlier = error.retraction = self._retraction
        first = self._unverified.first_suspect(error.suspect_from)
        if self._unverified.trusts_context(first):
            return
        found = self._unverified.retract(first, str(error.args[0]))
        if found is not None:
            self._log.append(retracted_record(found))
            error.retraction = found if earlier is None else found.followed_by(earlier)
        elif earlier is not None:
            return
        self._retraction = error.retraction
        self._save_cut(*self._unverified.cut_of(found))
