"""All that the server knows of one stream: its ranks and commands, what was taken, what is shown.

Ranks, viewers and clients come and go; the session stays, and its journal lets it outlive the
server.
"""

import contextlib
import logging
import signal
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from scope_contracts.errors import LinkError, ScopeError, UserInputError
from scope_contracts.retraction import Retraction
from scope_runners.exit_codes import BAD_INPUT
from scope_runners.serve.events import Event, EventLog
from scope_runners.serve.group_control import GroupControl
from scope_runners.serve.histogram import HistogramCounts
from scope_runners.serve.journal import Journal, read_journal, rewrite
from scope_runners.serve.live_stage import LiveStage
from scope_runners.serve.measurements import Measurements
from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.messages import (
    ChunkHeader,
    CommandKind,
    End,
    Failed,
    GroupEnded,
    Message,
    Outcome,
    RankEvent,
    RankReady,
    RankState,
    Retracted,
    Taken,
    Welcome,
)
from scope_runners.serve.receipt_book import ReceiptBook
from scope_runners.serve.receipts import OF_RANK0, Receipt, command_of
from scope_runners.serve.session_files import SessionFiles, StreamJob
from scope_runners.serve.session_record import SessionRecord
from scope_runners.serve.session_states import SessionState
from scope_runners.serve.session_view import SessionView, told_of
from scope_runners.serve.settings import ServeSettings, check_keeps_latents
from scope_runners.serve.taken_chunks import TakenChunks
from scope_runners.serve.wire import Connection

_OVER = (SessionState.STOPPED, SessionState.FAILED)
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
        self._lock = threading.RLock()
        # Above all numbers of an earlier server, for clients that come back.
        first_seq = int(time.time() * 1000)
        self.events = EventLog(first_seq=first_seq, observe=lambda event: observe(record.id, event))
        self.taken, self._is_paused = TakenChunks(), False
        self._journal, receipts = self._restored()
        self.taken.note_in(self._journal)
        self.receipts = ReceiptBook(self._journal, self._tell_receipt)
        for fact in receipts:
            self.receipts.restore(fact)
        self.measured = Measurements()
        self.group = GroupControl(files)
        self.stage = LiveStage(
            settings,
            files,
            receipts=self.receipts,
            measured=self.measured,
            events=self.events,
            send=self._send,
            on_error=self.give_up_by,
            clock=clock,
        )
        self.stage.pause(is_paused=self._is_paused)
        self._rank0: Connection | None = None
        self._launcher: Connection | None = None
        self._ready: RankReady | None = None
        self._ranks: dict[int, RankEvent] = {}
        self._retractions: list[Retraction] = []
        self._state, self._detail = SessionState.STARTING, "its ranks start"
        self._failure = ""
        self._is_ending = False
        self._asked_at_s = clock()

    def _restored(self) -> tuple[Journal, list[dict[str, Any]]]:
        """The journal, written anew with what still matters, and the receipts in it."""
        path, receipts = self.files.journal, dict[str, Mapping[str, Any]]()
        for fact in read_journal(path) if path.exists() else ():
            self.taken.restore(fact)
            if fact["fact"] == "receipt":
                receipts[fact["id"]] = fact
            elif fact["fact"] == "paused":
                self._is_paused = fact["is_paused"]
        paused = {"fact": "paused", "is_paused": self._is_paused}
        rewrite(path, [*self.taken.facts, *receipts.values(), paused])
        plain = [{k: v for k, v in fact.items() if k != "fact"} for fact in receipts.values()]
        return Journal(path), plain

    # What a client sees.

    def view(self) -> dict[str, Any]:
        """As JSON has it."""
        with self._lock:
            view = SessionView(
                record=self.record,
                state=self._state,
                detail=self._detail,
                prompt=self.prompt,
                ready=self._ready,
                ranks=tuple(self._ranks.values()),
                newest=self.taken.last,
                is_paused=self._is_paused,
                retractions=tuple(self._retractions),
            )
        return view.told(self.stage)

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
        return self._state

    @property
    def hub(self) -> MediaHub | None:
        """What viewers join; None before the first chunk can come."""
        return self.stage.hub

    @property
    def prompt(self) -> str:
        """The newest that took effect."""
        return self.receipts.newest_prompt or self.record.prompt

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
        with self._lock:
            if self._state in _OVER:
                raise UserInputError(f"the session has {self._state}: {self._detail}")
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
            elif is_new and at_chunk < 0 and self._rank0 is not None and self._ready is not None:
                if fields.get("hard_cut") or kind is CommandKind.HARD_CUT:
                    self.stage.grant()  # nobody wants to see what would come before it
                self._send(command_of(receipt))
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
        self._journal.append({"fact": "paused", "is_paused": is_paused})
        self._is_paused = is_paused
        self.stage.pause(is_paused=is_paused)
        if self._state in _RUNS:
            self._become(*self._as_it_runs())

    # Its processes.

    def start(self, job: StreamJob) -> None:
        """Start its ranks, unless those of an earlier server still run."""
        self.files.write_job(job)
        if not self.group.runs:
            self.group.start()

    def serve_launcher(self, connection: Connection, pid: int) -> None:
        """Until the connection is gone, which raises `LinkError`."""
        with self._lock:
            self._launcher, self.group.pid = connection, pid
            is_ending = self._is_ending
        if is_ending:
            connection.send(End())
        try:
            while True:
                message, _ = connection.receive()
                self._launcher_said(message)
        finally:
            with self._lock:
                if self._launcher is connection:
                    self._launcher = None

    def serve_rank0(self, connection: Connection) -> None:
        """Until the connection is gone, which raises `LinkError`."""
        with self._lock:
            if self._rank0 is not None:
                self._rank0.close()  # of a process that is gone
            self._rank0, self._ready = connection, None
        try:
            while True:
                message, body = connection.receive()
                self._rank0_said(connection, message, body)
        finally:
            with self._lock:
                if self._rank0 is connection:
                    self._rank0 = self._ready = None
                    self.stage.suspend()
                    if self._state not in _OVER and not self._is_ending:
                        self._become(SessionState.RECOVERING, self._why_rank0_is_gone())

    def _why_rank0_is_gone(self) -> str:
        rewinds = (r for r in self.receipts.to_send() if r.kind is CommandKind.REWIND)
        wanted = next((receipt.fields["chunk_index"] for receipt in rewinds), None)
        if wanted is not None:
            return f"rewinding to chunk {wanted}: its ranks start again"
        return self._failure or "rank 0 is gone; it starts again"

    def end(self, why: str) -> None:
        """End the stream in order: the chunk that is made is finished; blocks `END_S` at most."""
        with self._lock:
            self._is_ending = True
            launcher = self._launcher
        if launcher is not None:
            try:
                launcher.send(End())
            except LinkError as error:
                _LOG.info("%s", error)
        if self.group.runs:
            self.group.wait()
        self.stage.close()
        if self._state is not SessionState.FAILED:
            self._become(SessionState.STOPPED, why)
        self._journal.close()

    def give_up(self, why: str) -> None:
        """Nobody resumes it: commands that wait are refused."""
        self.receipts.close(why)

    def give_up_by(self, error: ScopeError) -> None:
        """It cannot go on: its ranks end in order, and the next server of the folder continues."""
        _LOG.error("session %s: %s", self.record.id, error)
        with self._lock:
            if self._is_ending or self._state in _OVER:
                return
            self._is_ending, launcher = True, self._launcher
            self._state, self._detail = SessionState.FAILED, str(error)
        self.stage.suspend()
        if launcher is not None:
            with contextlib.suppress(LinkError):
                launcher.send(End())
        self.events.publish("state", session=self.view())

    def look(self) -> None:
        """Once a second: tell how it runs, and whether its launcher is gone without a word."""
        self.events.publish("stats", stats=self.stats())
        with self._lock:
            is_over = self._is_ending or self._state in _OVER
            if is_over or self._launcher is not None or self.group.runs:
                return
            self._fail(f"its ranks have ended; see {self.files.group_output}")

    def _launcher_said(self, message: Message) -> None:
        match message:
            case RankEvent():
                self._rank_changed(message)
            case GroupEnded() if self._state is SessionState.FAILED:
                pass  # why is said
            case GroupEnded(code=code):
                if self._is_ending or code == 0:
                    self._become(SessionState.STOPPED, "its ranks have ended")
                    self.receipts.close(self._detail)
                else:
                    self._fail(f"its ranks ended with {code}")
            case _:
                raise LinkError(f"a launcher does not send {type(message).__name__}")

    def _rank_changed(self, event: RankEvent) -> None:
        with self._lock:
            self._ranks[event.rank] = event
            is_lost = event.state is RankState.LOST and not self._is_ending
        detail = _how_it_is(event)
        self.events.publish("rank", rank=event.rank, state=str(event.state), detail=detail)
        if is_lost and event.code != BAD_INPUT:  # of which no start follows
            self._become(SessionState.RECOVERING, f"{detail}; all ranks start again")

    def _rank0_said(self, connection: Connection, message: Message, body: bytearray) -> None:
        match message:
            case RankReady():
                self._begin(connection, message)
            case ChunkHeader():
                self._take(connection, message, body)
            case Outcome():
                self.receipts.answer(message)
            case Retracted(retraction=retraction):
                self._retract((retraction,))
            case Failed(sentence=sentence):
                self._failure = sentence
            case _:
                raise LinkError(f"rank0 does not send {type(message).__name__}")

    def _begin(self, connection: Connection, ready: RankReady) -> None:
        """Rank0 can stream: tell it what is here, and what it has not answered."""
        with self._lock:
            if ready.resumed:
                self._retract(ready.retractions)
                if self.taken.forget_from(ready.next_chunk):
                    self.stage.forget()
                self.measured.num_recoveries += not self._answer_rewinds(ready.next_chunk)
            self._ready = ready
            num_taken, last = len(self.taken), self.taken.last[0]
            orphan_s = self._settings.orphan_s
            connection.send(Welcome(num_taken=num_taken, last_taken=last, orphan_s=orphan_s))
            for receipt in self.receipts.to_send():
                connection.send(command_of(receipt))
            self.stage.open(ready, next_chunk=max(ready.next_chunk, last + 1))
            self._become(*self._as_it_runs())
        self.stage.wake()

    def _answer_rewinds(self, next_chunk: int) -> bool:
        """Rank0 continues before `next_chunk`: where that was asked for, it was obeyed. Whether it
        was."""
        was_asked_for = False
        for receipt in self.receipts.to_send():
            is_rewind = receipt.kind is CommandKind.REWIND
            if is_rewind and next_chunk <= receipt.fields["chunk_index"]:
                epoch = max(0, self.taken.last[1])
                self.receipts.answer(
                    Outcome(command_id=receipt.id, chunk_index=next_chunk, cache_epoch=epoch)
                )
                was_asked_for = True
        return was_asked_for

    def _take(self, connection: Connection, header: ChunkHeader, body: bytearray) -> None:
        """A chunk: once, in order, and whole."""
        if zlib.crc32(body) != header.crc32:
            raise LinkError(f"chunk {header.chunk_index} came damaged; it is sent again")
        shape = (header.num_frames, header.height, header.width, 3)
        with self._lock:
            is_new = self.taken.add(header.chunk_index, header.cache_epoch)
            connection.send(Taken(num_taken=len(self.taken)))
        if is_new:
            self.stage.take(header, np.frombuffer(body, dtype=np.uint8).reshape(shape))
            self._look_at_speed()

    def _look_at_speed(self) -> None:
        with self._lock:
            state, detail = self._as_it_runs()
            if self._state in (SessionState.LIVE, SessionState.DEGRADED) and state != self._state:
                self._become(state, detail)

    def _as_it_runs(self) -> tuple[SessionState, str]:
        """What the session is while its ranks run."""
        if self._is_paused:
            return SessionState.PAUSED, "paused"
        slowness = self.stage.slowness
        return (SessionState.DEGRADED, slowness) if slowness else (SessionState.LIVE, "live")

    def _send(self, message: Message, body: bytes = b"") -> None:
        """To rank0, where it is there."""
        rank0 = self._rank0
        if rank0 is not None:
            try:
                rank0.send(message, body)
            except LinkError as error:
                _LOG.info("%s", error)

    # What is told.

    def _become(self, state: SessionState, detail: str) -> None:
        with self._lock:
            self._state, self._detail = state, detail
        self.events.publish("state", session=self.view())

    def _fail(self, why: str) -> None:
        why = self._failure or self.group.last_sentence() or why
        self._become(SessionState.FAILED, why)
        self.receipts.close(self._detail)

    def _tell_receipt(self, receipt: Receipt) -> int:
        return self.events.publish("receipt", receipt=receipt.to_plain())

    def _retract(self, retractions: tuple[Retraction, ...]) -> None:
        for each in retractions:
            if each in self._retractions:
                continue
            self._retractions.append(each)
            self.measured.is_wrong = True
            self.measured.num_retracted += each.last_chunk - each.first_chunk + 1
            if self.hub is not None:
                self.hub.retracted(each)
            self.events.publish("retracted", **told_of(each))


def _how_it_is(event: RankEvent) -> str:
    if event.state is RankState.RUNNING:
        return f"rank {event.rank} runs"
    if event.code < 0:
        return f"rank {event.rank} was ended by {signal.Signals(-event.code).name}"
    return f"rank {event.rank} ended with {event.code}"
