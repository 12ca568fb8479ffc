"""How a session is, in the words of `SessionState`; whoever listens is told of each change."""

import signal
import threading
from typing import Any

from scope_contracts.retraction import Retraction
from scope_runners.exit_codes import BAD_INPUT
from scope_runners.serve.events import EventLog
from scope_runners.serve.live_stage import LiveStage
from scope_runners.serve.measurements import Measurements
from scope_runners.serve.messages import RankEvent, RankReady, RankState
from scope_runners.serve.receipt_book import ReceiptBook
from scope_runners.serve.recoveries import Recoveries
from scope_runners.serve.session_record import SessionRecord
from scope_runners.serve.session_states import SessionState
from scope_runners.serve.session_view import SessionView, told_of
from scope_runners.serve.taken_chunks import TakenChunks


class SessionStatus:
    """Any thread may use it; what decides by more than one of its values holds `lock`."""

    def __init__(
        self,
        record: SessionRecord,
        *,
        taken: TakenChunks,
        receipts: ReceiptBook,
        measured: Measurements,
        stage: LiveStage,
        events: EventLog,
        is_paused: bool,
    ) -> None:
        """The session starts."""
        self._record, self._taken, self._receipts = record, taken, receipts
        self._measured, self._stage, self._events = measured, stage, events
        self.lock = threading.RLock()
        self.state, self.detail = SessionState.STARTING, "its ranks start"
        self.failure = ""
        """By which rank0 said that it ends; "" where it said nothing."""
        self.is_paused = is_paused
        self.is_ending = False
        """Whether its ranks were told to end."""
        self.ready: RankReady | None = None
        """What rank0 said; None while it is not there."""
        self._ranks: dict[int, RankEvent] = {}
        self._retractions: list[Retraction] = []
        self._recoveries = Recoveries()

    @property
    def prompt(self) -> str:
        """The newest that took effect."""
        return self._receipts.newest_prompt or self._record.prompt

    @property
    def as_it_runs(self) -> tuple[SessionState, str]:
        """What the session is while its ranks run."""
        if self.is_paused:
            return SessionState.PAUSED, "paused"
        slowness = self._stage.slowness
        return (SessionState.DEGRADED, slowness) if slowness else (SessionState.LIVE, "live")

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be streamed before it is started again."""
        return self.state in (SessionState.STOPPED, SessionState.FAILED)

    def view(self) -> dict[str, Any]:
        """As JSON has it."""
        with self.lock:
            view = SessionView(
                record=self._record,
                state=self.state,
                detail=self.detail,
                prompt=self.prompt,
                ready=self.ready,
                ranks=tuple(self._ranks.values()),
                newest=self._taken.last,
                is_paused=self.is_paused,
                retractions=tuple(self._retractions),
                recoveries=self._recoveries.all,
            )
        return view.told(self._stage)

    def become(self, state: SessionState, detail: str) -> None:
        """Say so to everyone."""
        with self.lock:
            self.state, self.detail = state, detail
        self._events.publish("state", session=self.view())

    def look_at_speed(self) -> None:
        """Live or degraded, as what is shown now is fast."""
        with self.lock:
            state, detail = self.as_it_runs
            if self.state in (SessionState.LIVE, SessionState.DEGRADED) and state != self.state:
                self.become(state, detail)

    def rank_changed(self, event: RankEvent) -> None:
        """A rank was started, or has ended."""
        with self.lock:
            self._ranks[event.rank] = event
            is_lost = event.state is RankState.LOST and not self.is_ending
        detail = _how_it_is(event)
        self._events.publish("rank", rank=event.rank, state=str(event.state), detail=detail)
        if is_lost and event.code != BAD_INPUT:  # of which no start follows
            self.recover(f"{detail}; all ranks start again", is_of_rank=True)

    def recover(self, why: str, *, is_of_rank: bool = False, is_asked_for: bool = False) -> None:
        """Say that pictures wait for ranks, and why: of a loss its first cause."""
        with self.lock:
            why = self._recoveries.lost(why, is_of_rank=is_of_rank, is_asked_for=is_asked_for)
            if (self.state, self.detail) != (SessionState.RECOVERING, why):
                self.become(SessionState.RECOVERING, why)

    def ranks_are_ready(self) -> None:
        """What is lost from here on has a cause of its own."""
        with self.lock:
            self._recoveries.ready()

    def chunk_came(self, chunk_index: int) -> None:
        """A new one; by the first after a loss that loss is over."""
        with self.lock:
            if self._recoveries.came(chunk_index):
                self.become(self.state, self.detail)

    def retract(self, *retractions: Retraction) -> None:
        """Chunks that were given were wrong; each is told once."""
        for each in retractions:
            with self.lock:
                if each in self._retractions:
                    continue
                self._retractions.append(each)
            self._measured.is_wrong = True
            self._measured.num_retracted += each.last_chunk - each.first_chunk + 1
            if self._stage.hub is not None:
                self._stage.hub.retracted(each)
            self._events.publish("retracted", **told_of(each))


def _how_it_is(event: RankEvent) -> str:
    if event.state is RankState.RUNNING:
        return f"rank {event.rank} runs"
    if event.code < 0:
        name = signal.Signals(-event.code).name
        was = "killed" if name == "SIGKILL" else "ended"
        return f"rank {event.rank} was {was} ({name})"
    return f"rank {event.rank} ended with {event.code}"
