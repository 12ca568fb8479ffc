"""One file tells what became of a stream, by whole records; it never ends the stream.

Records are written in order on a thread of their own, those of a chunk by one write: to wake the
thread costs more than all it does. They are encoded by who appends them, as both threads need
Python's lock for that. A record that nobody asks to be written is written within a second.

Whoever asks for `offset` waits until all that was appended is there, at most `STALL_TIMEOUT_S`: a
crash of this process loses nothing before it. What cannot be written stops, the less needed first:
latents, then the log as a whole, which then ends at its last whole record.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from weakref import WeakMethod

from scope_contracts.errors import ContractError, ScopeError, UserInputError
from scope_contracts.log_file import pack
from scope_contracts.log_records import (
    Closed,
    Control,
    Dropped,
    Durable,
    Failed,
    Finished,
    Planned,
    Published,
    Record,
    Retracted,
    Segment,
)
from scope_rt.disk import STALL_TIMEOUT_S, DaemonExecutor, StallError, answer, complete
from scope_rt.faults import FaultPoint, Faults, NoFaults
from scope_rt.record.log_check import LogCheck
from scope_rt.record.log_disk import begin_log, cut_off, open_log, resume_log, write_at

_LOG = logging.getLogger(__name__)


def _allow() -> None: ...


@dataclass(slots=True, eq=False)
class _Appended:
    """A record that is not written yet, with its blob; `data` is both as the file will have them,
    empty where they cannot be encoded."""

    record: Record
    blob: bytes
    data: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """What is called once the records before it are written, and before any after it."""

    call: Callable[[int], None]
    future: Future[None]


class StreamLog:
    """Appends the records of a stream; any thread may. One living writer a file.

    Args:
        path: an existing file is replaced, or with `resume` continued after its last whole record.
        record_latents: whether the blobs of `Finished` records are kept; without them a log can be
            inspected and resumed, and not replayed.
        resume: continue the file of an earlier process; what a crash cut off is removed.
        at_least: bytes that the file to resume must hold, as a snapshot names them.
        check: called once the file is locked, before it is changed; raises to leave it as it is.

    Raises:
        UserInputError: the file cannot be written or has another living writer; or it is to be
            resumed and is not there, damaged or shorter than `at_least`. It is then left as it is.
    """

    def __init__(
        self,
        path: Path,
        *,
        record_latents: bool = False,
        resume: bool = False,
        at_least: int = 0,
        check: Callable[[], None] = _allow,
        faults: Faults | None = None,
    ) -> None:
        self.path = path
        self.failure: str | None = None
        """Why the log ended early, in one sentence; then no later resume point may be saved."""
        self.latents_failure: str | None = None
        """Why latents are no longer kept, in one sentence."""
        self._faults: Faults = faults or NoFaults()
        self._record_latents = record_latents
        self._chunk_index = -1
        self._lock = threading.Lock()
        self._num_appended = self._num_written = 0
        self._appended: list[_Appended | _Call] = []
        self._is_asked_to_write = False
        """The thread is awake or will be, and has not taken what was appended."""
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        """Who waits for how many records; a call of its own would wake the thread once more."""
        self._disk = DaemonExecutor("stream-log", idle=_writing(WeakMethod(self._write_appended)))
        self._check: LogCheck | None = None
        try:
            self._file: int | None = open_log(path, must_exist=resume)
        except OSError as error:
            raise UserInputError(
                f"stream log {path}: cannot be {'resumed' if resume else 'written'} "
                f"({error.strerror}); choose another file"
            ) from error
        try:
            check()
            self._end = (
                resume_log(self._file, path, at_least=at_least) if resume else begin_log(self._file)
            )
        except OSError as error:
            self.close()
            raise UserInputError(
                f"stream log {path}: cannot be written ({error.strerror}); free disk space or "
                "choose another file"
            ) from error
        except ScopeError:
            if not resume and not os.fstat(self._file).st_size:
                path.unlink(missing_ok=True)  # while it is locked: perhaps it was not there before
            self.close()
            raise
        self._check = LogCheck(path, self._disk) if resume else None

    @property
    def offset(self) -> int:
        """Bytes of whole records, all that were appended.

        Blocks until they are written, `STALL_TIMEOUT_S` at most. Raises `DamageError` where what
        was resumed is found to be damaged.
        """
        if self._check is not None:
            self._check.raise_damage()
        self.flush()
        return self._end

    def append(self, record: Record, blob: bytes = b"") -> None:
        """Have `record` written with its `blob`; raises nothing. Any thread may call this.

        Those of a chunk wait for each other, until `write_soon` or a second has gone. Blocks,
        `STALL_TIMEOUT_S` at most, for a record that says what has become of the video or of the
        stream, and where the disk is `_MOST_WAITING` records behind. Once `failure` is set, it
        does nothing.
        """
        appended = self._encoded(record, blob)
        with self._lock:
            if self.failure is not None or self._file is None:
                return
            self._num_appended += 1
            self._appended.append(appended)
            if not isinstance(record, _OF_A_CHUNK):
                self._ask_to_write()
        is_behind = self._num_appended - self._num_written > _MOST_WAITING
        if is_behind or isinstance(record, _WRITTEN_AT_ONCE):
            self.flush()

    def write_soon(self) -> None:
        """Have written what was appended so far; returns at once."""
        with self._lock:
            self._ask_to_write()

    def _ask_to_write(self) -> None:
        """Under the lock."""
        if self._appended and not self._is_asked_to_write:
            self._is_asked_to_write = True
            self._disk.post(self._write_appended)

    def flush(self) -> None:
        """Return when all that was appended is written, or the log has failed.

        Blocks for at most `STALL_TIMEOUT_S`.
        """
        with self._lock:
            if self._num_written == self._num_appended or self.failure is not None:
                return
            written = threading.Lock()
            written.acquire()
            self._waiting.append((self._num_appended, written))
            self._ask_to_write()
        if not written.acquire(timeout=STALL_TIMEOUT_S):
            self._fail(_reason(StallError(STALL_TIMEOUT_S)))

    def when_written(self, call: Callable[[int], None]) -> Callable[[], None]:
        """Have the thread that writes call `call` with the log's end, once all that was appended so
        far is written, and nothing later: not where the log has failed by then, nor once it is
        closed.

        Returns at once what waits for that: it blocks for at most `STALL_TIMEOUT_S`, and raises
        what `call` raises, and `StallError` where that gets no answer from its disk; the log ends
        then, too. Raises `DamageError` as `offset`.
        """
        if self._check is not None:
            self._check.raise_damage()
        called = Future[None]()
        with self._lock:
            if self._file is None:
                return _allow  # the thread has ended, and would never answer
            self._appended.append(_Call(call, called))
            self._ask_to_write()
        return partial(self._await_call, called)

    def _await_call(self, called: Future[None]) -> None:
        try:
            answer(called, timeout_s=STALL_TIMEOUT_S)
        except StallError as error:
            self._fail(_reason(error))
            if not called.cancelled():  # it had begun: the records before it are written
                raise

    def _call_at_end(self, call: Callable[[int], None]) -> None:
        if self.failure is None:
            call(self._end)

    def settle_check(self) -> None:
        """Return when all that was in the file to resume was read and compared.

        Blocks while the disk answers, at most `STALL_TIMEOUT_S` for one answer. Raises
        `DamageError` where it is damaged.
        """
        if self._check is not None:
            self._check.settle()

    def close(self) -> None:
        """Write what was appended and let go of the file. Idempotent.

        Blocks for at most `STALL_TIMEOUT_S`, and a second more for a disk that gives no answer.
        """
        self.flush()
        if self._check is not None:
            self._check.stop()
        self._release()

    def remove(self) -> None:
        """Close, and delete the file: the stream is told in full elsewhere. Raises `OSError`."""
        self.path.unlink(missing_ok=True)  # before another writer can lock it
        self.close()

    def _encoded(self, record: Record, blob: bytes) -> _Appended:
        """What will be written; why a record cannot be encoded is found out again then."""
        appended = _Appended(record, blob)
        with suppress(ContractError):
            self._encode(appended)
        return appended

    def _encode(self, appended: _Appended) -> None:
        """Without latents where they are not kept, or no longer. Raises `ContractError`."""
        if appended.blob and not self._record_latents and isinstance(appended.record, Finished):
            appended.record, appended.blob = replace(appended.record, latents=None), b""
            appended.data = b""
        appended.data = appended.data or pack(appended.record, appended.blob)

    def _write_appended(self) -> None:
        """On the disk's thread: what was appended, or as much of it as the disk has room for."""
        with self._lock:
            appended, self._appended = self._appended, []
            self._is_asked_to_write = False
        records: list[_Appended] = []
        for each in appended:
            if isinstance(each, _Appended):
                records.append(each)
                continue
            self._write_records(records)
            complete(each.future, partial(self._call_at_end, each.call))
            records = []
        self._write_records(records)

    def _write_records(self, appended: list[_Appended]) -> None:
        if not appended:
            return
        try:
            self._write_in_order(appended)
        except Exception as error:  # noqa: BLE001 - a bug of ours: no record may be missing unsaid
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._num_written += len(appended)
                while self._waiting and self._waiting[0][0] <= self._num_written:
                    self._waiting.popleft()[1].release()

    def _write_in_order(self, appended: list[_Appended]) -> None:
        ready: list[_Appended] = []
        for each in appended:
            if isinstance(each.record, Planned):
                self._chunk_index = each.record.envelope.chunk_index
            try:
                self._encode(each)
                each.data = self._faults.reach(FaultPoint.RECORD, self._chunk_index, each.data)
            except (OSError, ContractError) as error:
                self._write_together(ready)
                self._refuse(each.record, error)
                ready = []
            else:
                ready.append(each)
        self._write_together(ready)

    def _write_together(self, ready: list[_Appended]) -> None:
        """By one write; where that fails, one by one: the disk may have room for some."""
        try:
            self._write_whole(b"".join([each.data for each in ready]))
        except OSError:
            for each in ready:
                try:
                    self._encode(each)
                    self._write_whole(each.data)
                except (OSError, ContractError) as error:
                    self._refuse(each.record, error)

    def _write_whole(self, data: bytes) -> None:
        if self._file is None or self.failure is not None or not data:
            return
        write_at(self._file, self._end, data)
        with self._lock:
            if self.failure is None:  # else it came too late, and is cut off
                self._end += len(data)

    def _refuse(self, record: Record, error: OSError | ContractError) -> None:
        """`record` cannot be written: continue without latents, or if that does not help, not at
        all."""
        reason = _reason(error)
        if not isinstance(record, Finished) or not record.latents:
            self._fail(reason)
            return
        self._record_latents = False
        self.latents_failure = (
            f"stream log {self.path} holds no latents from chunk {record.chunk_index} on "
            f"({reason}), so it can be resumed and not replayed; free disk space or choose "
            "another file"
        )
        _LOG.warning("%s", self.latents_failure)
        try:
            if self._file is not None:
                os.ftruncate(self._file, self._end)
            data = pack(replace(record, latents=None))
            data = self._faults.reach(FaultPoint.RECORD, self._chunk_index, data)
            self._write_whole(data)
        except (OSError, ContractError) as again:
            self._fail(_reason(again))

    def _fail(self, reason: str) -> None:
        """Keep the whole records and write no more; the first reason counts."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = (
                f"stream log {self.path} ended after {self._end} bytes ({reason}); the stream "
                "continues and can be resumed only from there; free disk space or choose another "
                "file"
            )
            if self._file is not None:  # after a write that stalled, this comes when that does
                self._disk.submit(cut_off, self._file, self._end)
        _LOG.warning("%s", self.failure)

    def _release(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                self._disk.submit(os.close, file)  # after a write that may still be under way
        if file is not None:
            self._disk.settle(timeout_s=_CLOSE_TIMEOUT_S)
            self._disk.shutdown()


def _writing(write: WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """Calls `write` for as long as its owner lives, and does not keep it alive."""

    def run() -> None:
        if (living := write()) is not None:
            living()

    return run


def _reason(error: OSError | ContractError) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)


_OF_A_CHUNK = (Planned, Control, Dropped, Finished)
_WRITTEN_AT_ONCE = (Segment, Durable, Published, Retracted, Failed, Closed)
_MOST_WAITING = 64
"""Records that may wait for the disk: memory is bounded where nobody asks for `offset`."""
_CLOSE_TIMEOUT_S = 1.0
"""How long a disk may take to let go of a file; its lock ends with the process at the latest."""
