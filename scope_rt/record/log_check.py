"""What a resumed log held before is read in full while the stream goes on, and compared.

A stream that is resumed reads its log's records, and steps over the latents: an hour of video is
gigabytes of them. Those are read here on the log's own thread, a few milliseconds at a time between
its writes, so that no chunk waits for it.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from scope_contracts.errors import ContractError, DamageError
from scope_contracts.log_file import Entry, LogReader
from scope_rt.disk import STALL_TIMEOUT_S, DaemonExecutor, StallError

_TURN_S = 0.005
"""How long a write may have to wait for the reading of records; the last one is read to its end."""


class LogCheck:
    """Reads the records that are in the file now; any thread may ask what it has found."""

    def __init__(self, path: Path, disk: DaemonExecutor) -> None:
        self._path, self._disk = path, disk
        self._failure: Exception | None = None
        self._num_read = 0
        self._is_stopped = False
        self._done = threading.Event()
        disk.submit(self._go_on, self._entries())

    def raise_damage(self) -> None:
        """Return at once where nothing was found so far.

        Raises:
            DamageError: naming the byte at which the log is damaged.
        """
        if self._failure is not None:
            raise DamageError(
                f"stream log {self._path}: what was to be resumed cannot be trusted "
                f"({self._failure}); all before it can be read with scope-rt inspect; to start "
                f"the stream anew, move {self._path} away"
            ) from self._failure

    def settle(self) -> None:
        """Return when all was read. Blocks while the disk answers, at most `STALL_TIMEOUT_S` for
        one answer; raises what `raise_damage` does."""
        num_read = -1
        while not self._is_stopped and not self._done.wait(STALL_TIMEOUT_S):
            if num_read == self._num_read:
                self._failure = StallError(STALL_TIMEOUT_S)
                break
            num_read = self._num_read
        self.raise_damage()

    def stop(self) -> None:
        """Read no more."""
        self._is_stopped = True

    def _entries(self) -> Iterator[Entry]:
        with self._path.open("rb") as file:
            yield from LogReader(file)

    def _go_on(self, entries: Iterator[Entry]) -> None:
        until_s = time.perf_counter() + _TURN_S
        try:
            while next(entries, None) is not None:
                self._num_read += 1
                if self._is_stopped or time.perf_counter() > until_s:
                    break
            else:
                self._done.set()
                return
        except (ContractError, OSError) as error:
            self._failure = error
            self._done.set()
            return
        if not self._is_stopped:
            self._disk.submit(self._go_on, entries)
