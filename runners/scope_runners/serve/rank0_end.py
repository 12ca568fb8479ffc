"""The server's end of rank0: a chunk is taken once, in order and whole, and rank0 hears of it.

Rank0 may be another process each time: it says how far it came, and gets what it has not answered.
"""

import logging
import zlib

import numpy as np

from scope_contracts.errors import LinkError
from scope_runners.serve.live_stage import LiveStage
from scope_runners.serve.measurements import Measurements
from scope_runners.serve.messages import (
    ChunkHeader,
    CommandKind,
    Failed,
    Message,
    Outcome,
    RankReady,
    Retracted,
    Taken,
    Welcome,
)
from scope_runners.serve.outbox import Outbox
from scope_runners.serve.receipt_book import ReceiptBook
from scope_runners.serve.receipts import command_of
from scope_runners.serve.session_status import SessionStatus
from scope_runners.serve.taken_chunks import TakenChunks
from scope_runners.serve.wire import Connection

_LOG = logging.getLogger(__name__)


class Rank0End:
    """Any thread may use it."""

    def __init__(
        self,
        status: SessionStatus,
        *,
        taken: TakenChunks,
        receipts: ReceiptBook,
        measured: Measurements,
        stage: LiveStage,
        orphan_s: float,
    ) -> None:
        """Nobody is connected. Rank0 streams `orphan_s` longer than its server runs."""
        self._status, self._taken, self._receipts = status, taken, receipts
        self._measured, self._stage, self._orphan_s = measured, stage, orphan_s
        self._outbox: Outbox | None = None

    @property
    def can_obey(self) -> bool:
        """Whether rank0 is there and has said what it streams."""
        return self._outbox is not None and self._status.ready is not None

    def send(self, message: Message, body: bytes = b"") -> None:
        """Soon, where it is there; never blocks."""
        outbox = self._outbox
        if outbox is not None:
            outbox.put(message, body)

    def serve(self, connection: Connection) -> None:
        """Until the connection is gone, which raises `LinkError`."""
        status, outbox = self._status, Outbox(connection)
        with status.lock:
            if status.is_over:
                outbox.close()
                raise LinkError(f"the session has {status.state}")
            if self._outbox is not None:
                self._outbox.close()  # of a process that is gone
            self._outbox, status.ready = outbox, None
        try:
            while True:
                message, body = connection.receive()
                self._said(outbox, message, body)
        finally:
            outbox.close()
            with status.lock:
                if self._outbox is outbox:
                    self._outbox = status.ready = None
                    self._stage.suspend()
                    if not status.is_over and not status.is_ending:
                        self._recover()

    def _recover(self) -> None:
        rewinds = (r for r in self._receipts.to_send() if r.kind is CommandKind.REWIND)
        wanted = next((receipt.fields["chunk_index"] for receipt in rewinds), None)
        if wanted is not None:
            why = f"rewinding to chunk {wanted}: its ranks start again"
            self._status.recover(why, is_asked_for=True)
        else:
            self._status.recover(self._status.failure or "rank 0 is gone; it starts again")

    def _said(self, outbox: Outbox, message: Message, body: bytearray) -> None:
        match message:
            case RankReady():
                self._begin(outbox, message)
            case ChunkHeader():
                self._take(outbox, message, body)
            case Outcome():
                self._receipts.answer(message)
            case Retracted(retraction=retraction):
                self._status.retract(retraction)
            case Failed(sentence=sentence):
                self._status.failure = sentence
            case _:
                raise LinkError(f"rank0 does not send {type(message).__name__}")

    def _begin(self, outbox: Outbox, ready: RankReady) -> None:
        """Rank0 can stream: tell it what is here, and what it has not answered."""
        status = self._status
        with status.lock:
            status.retract(*ready.retractions)
            if ready.resumed:
                has_begun = self._taken.last[0] >= 0  # a fork has not: what it resumes is another's
                if self._taken.forget_from(ready.next_chunk):
                    self._stage.forget()
                is_asked_for = self._answer_rewinds(ready.next_chunk)
                self._measured.num_recoveries += has_begun and not is_asked_for
            status.ready = ready
            num_taken, last = len(self._taken), self._taken.last[0]
            outbox.put(Welcome(num_taken=num_taken, last_taken=last, orphan_s=self._orphan_s))
            for receipt in self._receipts.to_send():
                outbox.put(command_of(receipt))
            self._stage.open(ready, next_chunk=max(ready.next_chunk, last + 1))
            status.failure = ""
            status.ranks_are_ready()
            if status.is_ending:  # it came back with what it had made
                self._stage.suspend()
            else:
                status.become(*status.as_it_runs)
        self._stage.wake()

    def _answer_rewinds(self, next_chunk: int) -> bool:
        """Rank0 continues before `next_chunk`: where that was asked for, it was obeyed. Whether it
        was."""
        was_asked_for = False
        for receipt in self._receipts.to_send():
            is_rewind = receipt.kind is CommandKind.REWIND
            if is_rewind and next_chunk <= receipt.fields["chunk_index"]:
                epoch = max(0, self._taken.last[1])
                self._receipts.answer(
                    Outcome(command_id=receipt.id, chunk_index=next_chunk, cache_epoch=epoch)
                )
                was_asked_for = True
        return was_asked_for

    def _take(self, outbox: Outbox, header: ChunkHeader, body: bytearray) -> None:
        """A chunk: once, in order, and whole."""
        if zlib.crc32(body) != header.crc32:
            raise LinkError(f"chunk {header.chunk_index} came damaged; it is sent again")
        shape = (header.num_frames, header.height, header.width, 3)
        with self._status.lock:
            is_new = self._taken.add(header.chunk_index, header.cache_epoch)
            outbox.put(Taken(num_taken=len(self._taken)))
            if is_new:
                self._status.chunk_came(header.chunk_index)
                self._stage.take(header, np.frombuffer(body, dtype=np.uint8).reshape(shape))
                self._status.look_at_speed()
