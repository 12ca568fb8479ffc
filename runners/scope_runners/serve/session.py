"""All that the server knows of one stream: its ranks and commands, what was taken, what is shown.

Ranks, viewers and clients come and go; the session stays, and its journal lets it outlive the
server.
"""

import logging
import signal
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from scope_contracts.errors import LinkError, UserInputError
from scope_contracts.retraction import Retraction
from scope_rt.record.runs import Runs
from scope_runners.serve.events import Event, EventLog
from scope_runners.serve.group_control import GroupControl
from scope_runners.serve.histogram import HistogramCounts
from scope_runners.serve.journal import Journal, read_journal, rewrite
from scope_runners.serve.measurements import Measurements
from scope_runners.serve.media.frame import PlayedFrame
from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.messages import (
    ChunkHeader,
    CommandKind,
    Credit,
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
from scope_runners.serve.pacing import Pace
from scope_runners.serve.playout import Arrived, Playout, Timeline
from scope_runners.serve.receipt_book import ReceiptBook
from scope_runners.serve.receipts import OF_RANK0, Receipt, command_of
from scope_runners.serve.session_files import SessionFiles, StreamJob
from scope_runners.serve.session_states import SessionState
from scope_runners.serve.settings import ServeSettings
from scope_runners.serve.wire import Connection

_IDLE_TICK_S = 0.05
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """What a session was made with; times in seconds, since the Unix epoch."""

    id: str
    prompt: str
    settings: Mapping[str, Any]
    lease_s: float
    created_at: float
    forked_from: str = ""


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
        self.taken = Runs()
        self._retractions: list[Retraction] = []
        first_seq = int(time.time() * 1000)
        self.events = EventLog(first_seq=first_seq, observe=lambda event: observe(record.id, event))
        facts = list(read_journal(files.journal)) if files.journal.exists() else []
        restored = [fact for fact in facts if fact["fact"] == "receipt"]
        self._paused = any(fact["fact"] == "paused" and fact["is_paused"] for fact in facts[-64:])
        for fact in facts:
            if fact["fact"] == "taken":
                self.taken.add(fact["chunk"], fact["epoch"])
            elif fact["fact"] == "forgot":
                self.taken.forget(fact["chunk"])
        newest = {fact["id"]: fact for fact in restored}
        rewrite(files.journal, [*_taken_facts(self.taken), *newest.values()])
        self._journal = Journal(files.journal)
        self.receipts = ReceiptBook(self._journal, self._tell_receipt)
        for fact in newest.values():
            self.receipts.restore({k: v for k, v in fact.items() if k != "fact"})
        self.measured = Measurements()
        self.group = GroupControl(files)
        self._rank0: Connection | None = None
        self._launcher: Connection | None = None
        self._ready: RankReady | None = None
        self._ranks: dict[int, RankEvent] = {}
        self._pace = Pace(settings.pace, max_outstanding=1)
        self._credit_end = 0
        self._playout: Playout | None = None
        self.hub: MediaHub | None = None
        self._state, self._detail = SessionState.STARTING, "its ranks start"
        self._failure = ""
        self._is_ending = False
        self._asked_at_s = clock()

    # What a client sees.

    def view(self) -> dict[str, Any]:
        """As JSON has it."""
        with self._lock:
            ready, newest = self._ready, self.taken.last
            hub, playout = self.hub, self._playout
            base = f"/v1/sessions/{self.record.id}"
            return {
                "id": self.record.id,
                "state": str(self._state),
                "detail": self._detail,
                "prompt": self.prompt,
                "fps": ready.fps if ready else None,
                "width": ready.width if ready else None,
                "height": ready.height if ready else None,
                "plan": ready.plan if ready else None,
                "tp": ready.tp if ready else None,
                "world_size": ready.world_size if ready else None,
                "broken_on_purpose": ready.broken_on_purpose if ready else "",
                "lease_s": self.record.lease_s,
                "created_at": self.record.created_at,
                "forked_from": self.record.forked_from,
                "chunk_index": newest[0],
                "cache_epoch": newest[1],
                "chunk_s": ready.chunk_frames / ready.fps if ready else None,
                "media_time_s": playout.timeline.num_shown / ready.fps if playout and ready else 0,
                "lead_s": playout.timeline.media_left_s if playout else 0.0,
                "ranks": [
                    {"rank": each.rank, "state": str(each.state), "pid": each.pid}
                    for each in sorted(self._ranks.values(), key=lambda each: each.rank)
                ],
                "stats": self.stats(),
                "paused": self._paused,
                "viewers": hub.num_viewers if hub else 0,
                "recording": hub.recording if hub else None,
                "recordings": hub.recordings() if hub else [],
                "retractions": [_told(each) for each in self._retractions],
                "urls": {
                    "page": f"/?session={self.record.id}",
                    "events": f"{base}/events",
                    "commands": f"{base}/commands",
                    "whep": f"{base}/whep",
                    "fmp4": f"{base}/stream.fmp4",
                    "mjpeg": f"{base}/stream.mjpeg",
                    "recordings": f"{base}/recordings",
                },
            }

    def stats(self) -> dict[str, Any]:
        """As JSON has it, once a second."""
        hub, playout, ready = self.hub, self._playout, self._ready
        media = hub.stats() if hub else {}
        drops = {
            "hard_cut": playout.timeline.num_dropped if playout else 0,
            **media.pop("drops", {"slow_viewer": 0}),
        }
        return {
            **self.measured.told(),
            "frames_per_s": self.measured.frames_per_s(self._clock()),
            "cache_bytes": ready.cache_bytes if ready else 0,
            "stalls": playout.timeline.num_stalls if playout else 0,
            "lead_s": playout.timeline.media_left_s if playout else 0.0,
            "expected_chunk_s": self._pace.expected_s,
            "drops": drops,
            **media,
        }

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
    def prompt(self) -> str:
        """The newest that took effect."""
        done = [r for r in self.receipts.all() if r.kind is CommandKind.PROMPT and not r.error]
        done = [r for r in done if r.chunk_index >= 0]
        return str(done[-1].fields["text"]) if done else self.record.prompt

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
            if self._state in (SessionState.STOPPED, SessionState.FAILED):
                raise UserInputError(f"the session has {self._state}: {self._detail}")
            if kind is CommandKind.REWIND and not 0 <= fields["chunk_index"] <= self.taken.last[0]:
                raise UserInputError(
                    f"chunk {fields['chunk_index']} was not shown; give 0 to {self.taken.last[0]}"
                )
            at_chunk = self._credit_end + in_chunks if in_chunks else -1
            receipt, is_new = self.receipts.note(
                kind, fields, command_id=command_id, at_chunk=at_chunk
            )
            if is_new and kind not in OF_RANK0:
                self._obey(receipt)
            elif is_new and at_chunk < 0:
                self._send_command(receipt)
        if self._playout is not None:
            self._playout.wake()
        return self.receipts.get(receipt.id) or receipt

    def _send_command(self, receipt: Receipt) -> None:
        if self._rank0 is None or self._ready is None:
            return  # it is sent when rank0 is ready
        if receipt.fields.get("hard_cut") or receipt.kind is CommandKind.HARD_CUT:
            self._grant()  # nobody wants to see what would come before it
        self._send(command_of(receipt))

    def _obey(self, receipt: Receipt) -> None:
        """What the server does itself, at the chunk that is shown."""
        chunk = max(0, self._playout.timeline.last_chunk) if self._playout else 0
        outcome = Outcome(
            command_id=receipt.id, chunk_index=chunk, cache_epoch=max(0, self.taken.last[1])
        )
        try:
            match receipt.kind:
                case CommandKind.PAUSE | CommandKind.RESUME:
                    self._pause(is_paused=receipt.kind is CommandKind.PAUSE)
                case CommandKind.RECORD_START:
                    self._media().start_recording(str(receipt.fields.get("name") or ""))
                case CommandKind.RECORD_STOP:
                    self._media().stop_recording(str(receipt.fields.get("name") or ""))
        except UserInputError as error:
            outcome = Outcome(command_id=receipt.id, error=str(error))
        self.receipts.answer(outcome)

    def _media(self) -> MediaHub:
        if self.hub is None:
            raise UserInputError("nothing is shown yet; try again once the stream is live")
        return self.hub

    def _pause(self, *, is_paused: bool) -> None:
        self._paused = is_paused
        self._journal.append({"fact": "paused", "is_paused": is_paused})
        if self._playout is not None:
            self._playout.pause(is_paused=is_paused)
        if self._state in (SessionState.LIVE, SessionState.DEGRADED, SessionState.PAUSED):
            self._become(*self._as_it_runs())

    # Its processes.

    def start(self, job: StreamJob) -> None:
        """Start its ranks, unless those of an earlier server still run."""
        self.files.write_job(job)
        if not self.group.runs:
            self.group.start()

    def serve_launcher(self, connection: Connection, pid: int) -> None:
        """Until the connection is gone."""
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
        """Until the connection is gone."""
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
                    if self._state not in (SessionState.STOPPED, SessionState.FAILED):
                        self._become(SessionState.RECOVERING, "rank 0 is gone; it starts again")

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
        if self._playout is not None:
            self._playout.close()
        if self.hub is not None:
            self.hub.close()
        with self._lock:
            if self._state is not SessionState.FAILED:
                self._become(SessionState.STOPPED, why)
        self._journal.close()

    def give_up(self, why: str) -> None:
        """Nobody resumes it: commands that wait are refused."""
        self.receipts.close(why)

    def _launcher_said(self, message: Message) -> None:
        match message:
            case RankEvent():
                with self._lock:
                    self._ranks[message.rank] = message
                    lost = message.state is RankState.LOST and not self._is_ending
                detail = _how_it_ended(message)
                self.events.publish(
                    "rank", rank=message.rank, state=str(message.state), detail=detail
                )
                if lost:
                    self._become(SessionState.RECOVERING, f"{detail}; all ranks start again")
            case GroupEnded(code=code):
                with self._lock:
                    if self._is_ending or code == 0:
                        self._become(SessionState.STOPPED, "its ranks have ended")
                    else:
                        why = self._failure or f"its ranks ended with {code}"
                        self._become(SessionState.FAILED, why)
                    self.receipts.close(self._detail)
            case _:
                raise LinkError(f"a launcher does not send {type(message).__name__}")

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
                self.measured.num_recoveries += 1
                self._forget_from(ready.next_chunk)
            for receipt in self.receipts.to_send():
                if receipt.kind is CommandKind.REWIND and ready.resumed:
                    wanted = receipt.fields["chunk_index"]
                    if ready.next_chunk <= wanted:
                        self.receipts.answer(
                            Outcome(
                                command_id=receipt.id,
                                chunk_index=ready.next_chunk,
                                cache_epoch=max(0, self.taken.last[1]),
                            )
                        )
            self._ready = ready
            self._pace = Pace(self._settings.pace, max_outstanding=ready.max_in_flight)
            self._credit_end = max(ready.next_chunk, self.taken.last[0] + 1)
            if self._playout is None:
                self._open_media(ready)
            connection.send(
                Welcome(
                    num_taken=len(self.taken),
                    last_taken=self.taken.last[0],
                    orphan_s=self._settings.orphan_s,
                )
            )
            for receipt in self.receipts.to_send():
                connection.send(command_of(receipt))
            self._become(*self._as_it_runs())
        if self._playout is not None:
            self._playout.wake()

    def _open_media(self, ready: RankReady) -> None:
        self.hub = MediaHub(
            fps=Fraction(ready.fps),
            width=ready.width,
            height=ready.height,
            folder=self.files.recordings,
            max_viewers=self._settings.max_viewers,
            tell=self.events.publish,
        )
        timeline = Timeline(Fraction(ready.fps))
        self._playout = Playout(timeline, self._show, self._tick, self._clock)
        self._playout.pause(is_paused=self._paused)
        self._playout.start()

    def _forget_from(self, chunk_index: int) -> None:
        """Rank0 makes these again."""
        if self.taken.last[0] >= chunk_index:
            self._journal.append({"fact": "forgot", "chunk": chunk_index})
            self.taken.forget(chunk_index)
            if self._playout is not None:
                with self._playout.lock:
                    self._playout.timeline.forget()

    def _take(self, connection: Connection, header: ChunkHeader, body: bytearray) -> None:
        """A chunk: once, in order, and whole."""
        if zlib.crc32(body) != header.crc32:
            raise LinkError(f"chunk {header.chunk_index} came damaged; it is sent again")
        shape = (header.num_frames, header.height, header.width, 3)
        frames = np.frombuffer(body, dtype=np.uint8).reshape(shape)
        with self._lock:
            index, epoch, ready, playout = header.chunk_index, header.cache_epoch, self._ready, None
            if index > self.taken.last[0]:
                self._journal.append({"fact": "taken", "chunk": index, "epoch": epoch})
                self.taken.add(index, epoch)
                playout = self._playout
            connection.send(Taken(num_taken=len(self.taken)))
            if playout is None or ready is None:
                return
            now_s = self._clock()
            self._credit_end = max(self._credit_end, index + 1)
            self._pace.arrived(now_s, num_outstanding=self._credit_end - index - 1)
            is_late = playout.timeline.num_shown > 0 and playout.timeline.media_left_s <= 0
            self.measured.chunk(
                header.stage_ms,
                num_frames=header.num_frames,
                cache_epoch=epoch,
                cache_fill=header.cache_fill,
                is_late=is_late,
            )
        arrived = Arrived(frames=frames, chunk_index=index, cache_epoch=epoch)
        playout.add(arrived, chunk_s=self._pace.chunk_s)
        self.events.publish(
            "chunk",
            chunk_index=index,
            cache_epoch=epoch,
            prompt=header.prompt,
            num_frames=header.num_frames,
            recomputed=header.recomputed,
            stage_ms=dict(header.stage_ms),
            media_time_s=playout.timeline.num_shown / ready.fps,
        )
        self._look_at_speed(playout)

    def _look_at_speed(self, playout: Playout) -> None:
        with self._lock:
            if self._state in (SessionState.LIVE, SessionState.DEGRADED):
                state, detail = self._as_it_runs()
                if state is not self._state:
                    self._become(state, detail)

    def _as_it_runs(self) -> tuple[SessionState, str]:
        """What the session is while its ranks run."""
        if self._paused:
            return SessionState.PAUSED, "paused"
        playout, ready = self._playout, self._ready
        if playout is not None and ready is not None:
            shown = 1 / playout.timeline.interval_s
            if shown < 0.95 * ready.fps:
                return SessionState.DEGRADED, f"shows {shown:.1f} of {ready.fps} frames a second"
        return SessionState.LIVE, "live"

    # Showing, and what is begun next: on the playout's thread.

    def _show(self, frame: PlayedFrame) -> None:
        self.measured.frame(self._clock())
        assert self.hub is not None, "opened before anything is shown"
        self.hub.show(frame)
        if frame.is_first:
            for receipt in self.receipts.shown(frame.chunk_index):
                if receipt.latency_ms is not None and receipt.kind is not CommandKind.REWIND:
                    self.measured.latency(receipt.latency_ms)

    def _tick(self) -> float:
        """Grant the next chunk if it is time; returns when to look again at the latest."""
        with self._lock:
            ready, playout = self._ready, self._playout
            if ready is None or playout is None or self._paused or self._is_ending:
                return _IDLE_TICK_S
            in_s = self._pace.grant_in_s(
                playout.timeline.media_left_s, chunk_media_s=ready.chunk_frames / ready.fps
            )
            if in_s is None:
                return _IDLE_TICK_S
            if in_s > 0:
                return min(in_s, _IDLE_TICK_S)
            for receipt in self.receipts.due(self._credit_end):
                self.receipts.post_now(receipt)
                self._send(command_of(receipt))
            self._grant()
        return 0.0

    def _grant(self) -> None:
        self._credit_end += 1
        self._pace.granted(self._clock())
        self._send(Credit(end=self._credit_end))

    def _send(self, message: Message) -> None:
        if self._rank0 is not None:
            try:
                self._rank0.send(message)
            except LinkError as error:
                _LOG.info("%s", error)

    def look(self) -> None:
        """Once a second: tell how it runs, and whether its launcher is gone without a word."""
        self.events.publish("stats", stats=self.stats())
        with self._lock:
            is_over = self._state in (SessionState.STOPPED, SessionState.FAILED)
            if is_over or self._is_ending or self._launcher is not None or self.group.runs:
                return
            why = self._failure or f"its ranks have ended; see {self.files.group_output}"
            self._become(SessionState.FAILED, why)
            self.receipts.close(why)

    # What is told.

    def _become(self, state: SessionState, detail: str) -> None:
        with self._lock:
            self._state, self._detail = state, detail
        self.events.publish("state", session=self.view())

    def _tell_receipt(self, receipt: Receipt) -> int:
        return self.events.publish("receipt", receipt=receipt.to_plain())

    def _retract(self, retractions: tuple[Retraction, ...]) -> None:
        for each in retractions:
            if each in self._retractions:
                continue
            self._retractions.append(each)
            self.measured.num_retracted += each.last_chunk - each.first_chunk + 1
            if self.hub is not None:
                self.hub.retracted(each)
            self.events.publish("retracted", **_told(each))


def _told(retraction: Retraction) -> dict[str, Any]:
    return {
        "first_chunk": retraction.first_chunk,
        "last_chunk": retraction.last_chunk,
        "reason": retraction.reason,
    }


def _how_it_ended(event: RankEvent) -> str:
    if event.state is RankState.RUNNING:
        return f"rank {event.rank} runs"
    if event.code < 0:
        return f"rank {event.rank} was ended by {signal.Signals(-event.code).name}"
    return f"rank {event.rank} ended with {event.code}"


def _taken_facts(taken: Runs) -> list[dict[str, Any]]:
    return [{"fact": "taken", "chunk": index, "epoch": epoch} for index, epoch in taken]
