"""All that the server knows of one stream: its ranks and commands, what was taken, what is shown.

Ranks, viewers and clients come and go; the session stays, and its journal lets it outlive the
server.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from scope_contracts.errors import LinkError, ScopeError, UserInputError
from scope_runners.exit_codes import BAD_INPUT
from scope_runners.serve.events import Event, EventLog
from scope_runners.serve.group_control import GroupControl
from scope_runners.serve.histogram import HistogramCounts
from scope_runners.serve.journal import JournalError
from scope_runners.serve.live_stage import LiveStage
from scope_runners.serve.measurements import Measurements
from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.messages import (
    CommandKind,
    End,
    GroupEnded,
    Message,
    Outcome,
    RankEvent,
)
from scope_runners.serve.rank0_end import Rank0End
from scope_runners.serve.receipt_book import ReceiptBook
from scope_runners.serve.receipts import OF_RANK0, Receipt, command_of
from scope_runners.serve.restored_session import RestoredSession, paused
from scope_runners.serve.session_files import SessionFiles, StreamJob
from scope_runners.serve.session_record import SessionRecord
from scope_runners.serve.session_states import SessionState
from scope_runners.serve.session_status import SessionStatus
from scope_runners.serve.settings import ServeSettings, check_keeps_latents
from scope_runners.serve.wire import Connection

_RUNS = (SessionState.LIVE, SessionState.DEGRADED, SessionState.PAUSED)
_LOG = logging.getLogger(__name__)


class LiveSession:
    """Any thread may use it."""

    def __init__(
        self,
        record: SessionRecord,
        files: SessionFiles,
        settings: ServeSettings,
        *,
        observe: Callable[[str, Event], None] = lambda session_id, event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads what an earlier server left of it; starts nothing. `observe` is called with each
        event and must not block.

        Raises:
            UserInputError: its journal is damaged.
        """
        self.record, self.files = record, files
        self._settings, self._clock = settings, clock
        restored = RestoredSession.of(files)
        self._journal, self.taken = restored.journal, restored.taken
        # Above all numbers of an earlier server, for clients that come back.
        first_seq = time.time_ns() // 1000
        self.events = EventLog(
            first_seq=first_seq + len(restored.receipts),
            observe=lambda event: observe(record.id, event),
        )
        self.receipts = ReceiptBook(self._journal, self._tell_receipt)
        for seq, fact in enumerate(restored.receipts, start=first_seq):
            self.receipts.restore(fact, seq=seq)
        self.receipts.refuse_unobeyed()
        self.measured = Measurements()
        self.group = GroupControl(files)
        self.stage = LiveStage(
            settings,
            files,
            receipts=self.receipts,
            measured=self.measured,
            events=self.events,
            send=lambda message, body: self._rank0.send(message, body),
            on_error=self.give_up_by,
            clock=clock,
        )
        self.stage.pause(is_paused=restored.is_paused)
        self._status = SessionStatus(
            record,
            taken=self.taken,
            receipts=self.receipts,
            measured=self.measured,
            stage=self.stage,
            events=self.events,
            is_paused=restored.is_paused,
        )
        self._rank0 = Rank0End(
            self._status,
            taken=self.taken,
            receipts=self.receipts,
            measured=self.measured,
            stage=self.stage,
            orphan_s=settings.orphan_s,
        )
        self._launcher: Connection | None = None
        self._group_code = 0
        self._asked_at_s = clock()

    # What a client sees.

    def view(self) -> dict[str, Any]:
        """As JSON has it."""
        return self._status.view()

    def stats(self) -> dict[str, Any]:
        """As JSON has it, once a second."""
        return self.stage.stats()

    def stage_histograms(self) -> Mapping[str, HistogramCounts]:
        """Seconds that chunks spent in each stage."""
        return self.measured.stage_histograms()

    def latency_histogram(self) -> HistogramCounts:
        """Seconds from a command's post to its first picture."""
        return self.measured.latency_histogram()

    @property
    def state(self) -> SessionState:
        """What a person is told."""
        return self._status.state

    @property
    def has_refused(self) -> bool:
        """Whether its ranks ended because what they were given cannot be used."""
        return self._group_code == BAD_INPUT and self.state is SessionState.FAILED

    @property
    def hub(self) -> MediaHub | None:
        """What viewers join; None before the first chunk can come."""
        return self.stage.hub

    @property
    def prompt(self) -> str:
        """The newest that took effect."""
        return self._status.prompt

    def renew(self) -> None:
        """A client has asked for it: its lease begins anew."""
        self._asked_at_s = self._clock()

    @property
    def is_over(self) -> bool:
        """Whether nobody has asked for it within its lease, and nobody watches."""
        if not self.record.lease_s or (self.hub is not None and self.hub.num_viewers):
            return False
        return self._clock() - self._asked_at_s > self.record.lease_s

    # Commands.

    def post(
        self,
        kind: CommandKind,
        fields: Mapping[str, Any],
        *,
        command_id: str | None = None,
        in_chunks: int = 0,
    ) -> Receipt:
        """Take a command; one that was posted before is not taken again.

        Raises:
            UserInputError: it cannot be obeyed; the sentence says what to change.
        """
        status = self._status
        with status.lock:
            if status.is_over:
                raise UserInputError(f"the session has {status.state}: {status.detail}")
            last = self.taken.last[0]
            if kind is CommandKind.REWIND:
                check_keeps_latents(self._settings)
            if kind is CommandKind.REWIND and not 0 <= fields["chunk_index"] <= last:
                raise UserInputError(
                    f"chunk {fields['chunk_index']} was not shown; give 0 to {last}"
                )
            at_chunk = self.stage.chunk_in(in_chunks)
            receipt, is_new = self.receipts.note(
                kind, fields, command_id=command_id, at_chunk=at_chunk
            )
            if is_new and kind not in OF_RANK0:
                self._obey(receipt)
            elif is_new and at_chunk < 0 and self._rank0.can_obey:
                if fields.get("hard_cut") or kind is CommandKind.HARD_CUT:
                    self.stage.grant_for_cut()
                self._rank0.send(command_of(receipt))
        self.stage.wake()
        return self.receipts.get(receipt.id) or receipt

    def _obey(self, receipt: Receipt) -> None:
        """What the server does itself, at the chunk that is shown."""
        name, epoch = str(receipt.fields.get("name") or ""), max(0, self.taken.last[1])
        outcome = Outcome(
            command_id=receipt.id, chunk_index=self.stage.shown_chunk, cache_epoch=epoch
        )
        try:
            match receipt.kind:
                case CommandKind.PAUSE | CommandKind.RESUME:
                    self._pause(is_paused=receipt.kind is CommandKind.PAUSE)
                case CommandKind.RECORD_START:
                    self._media().start_recording(name)
                case CommandKind.RECORD_STOP:
                    self._media().stop_recording(name)
        except UserInputError as error:
            outcome = Outcome(command_id=receipt.id, error=str(error))
        self.receipts.answer(outcome)

    def _media(self) -> MediaHub:
        if self.hub is None:
            raise UserInputError("nothing is shown yet; try again once the stream is live")
        return self.hub

    def _pause(self, *, is_paused: bool) -> None:
        self._journal.append(paused(is_paused))
        self._status.is_paused = is_paused
        self.stage.pause(is_paused=is_paused)
        if self.state in _RUNS:
            self._status.become(*self._status.as_it_runs)

    # Its processes.

    def start(self, job: StreamJob) -> None:
        """Start its ranks, unless those of an earlier server still run."""
        self.files.write_job(job)
        if not self.group.runs:
            self.group.start()

    def serve_launcher(self, connection: Connection, pid: int) -> None:
        """Until the connection is gone, which raises `LinkError`."""
        with self._status.lock:
            self._launcher, self.group.pid = connection, pid
            is_ending = self._status.is_ending
        if is_ending:
            connection.send(End())
        try:
            while True:
                message, _ = connection.receive()
                self._launcher_said(message)
        finally:
            with self._status.lock:
                if self._launcher is connection:
                    self._launcher = None

    def serve_rank0(self, connection: Connection) -> None:
        """Until the connection is gone, which raises `LinkError`."""
        self._rank0.serve(connection)

    def end(self, why: str) -> None:
        """End the stream in order: the chunk that is made is finished; blocks `END_S` at most."""
        self._tell_ranks_to_end()
        if self.group.runs:
            self.group.wait()
        self.stage.close()
        if self.state is not SessionState.FAILED:
            self._status.become(SessionState.STOPPED, why)
        self._journal.close()

    def give_up(self, why: str) -> None:
        """Nobody resumes it: commands that wait are refused."""
        try:
            self.receipts.close(why)
        except JournalError as error:  # it is removed, and with it what would fill the disk
            _LOG.warning("%s", error)

    def give_up_by(self, error: ScopeError) -> None:
        """It cannot go on: its ranks end in order, and the next server of the folder continues."""
        _LOG.error("session %s: %s", self.record.id, error)
        status = self._status
        with status.lock:
            if status.is_ending or status.is_over:
                return
            status.is_ending = True
            status.state, status.detail = SessionState.FAILED, str(error)
        self.stage.suspend()
        self._tell_ranks_to_end()
        self.events.publish("state", session=self.view())

    def look(self) -> None:
        """Once a second: tell how it runs, and whether its launcher is gone without a word."""
        self.events.publish("stats", stats=self.stats())
        status = self._status
        with status.lock:
            is_over = status.is_ending or status.is_over
            if self._journal.is_long and not is_over:
                self.receipts.shorten([*self.taken.facts, paused(status.is_paused)])
            if is_over or self._launcher is not None or self.group.runs:
                return
            self._fail(f"its ranks have ended; see {self.files.group_output}")

    def _tell_ranks_to_end(self) -> None:
        with self._status.lock:
            self._status.is_ending = True
            launcher = self._launcher
        if launcher is not None:
            try:
                launcher.send(End())
            except LinkError as error:
                _LOG.info("%s", error)

    def _launcher_said(self, message: Message) -> None:
        match message:
            case RankEvent():
                self._status.rank_changed(message)
            case GroupEnded() if self.state is SessionState.FAILED:
                pass  # why is said
            case GroupEnded(code=code):
                self._group_code = code
                if self._status.is_ending or code == 0:
                    self._status.become(SessionState.STOPPED, "its ranks have ended")
                    self.receipts.close(self._status.detail)
                else:
                    self._fail(f"its ranks ended with {code}")
            case _:
                raise LinkError(f"a launcher does not send {type(message).__name__}")

    def _fail(self, why: str) -> None:
        why = self._status.failure or self.group.last_sentence() or why
        self._status.become(SessionState.FAILED, why)
        self.receipts.close(why)

    def _tell_receipt(self, receipt: Receipt) -> int:
        return self.events.publish("receipt", receipt=receipt.to_plain())
