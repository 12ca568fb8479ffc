"""A cue is sent until a chunk shows it: one that a crash has lost is sent again.

The acknowledgement names a chunk, which must show the cue. A resumed rank0 finds in the event log
what was sent and acknowledged before.
"""

from collections.abc import Sequence

from scope_lab.soak.event_log import (
    AttemptLog,
    CueAcknowledged,
    CueLost,
    CueSent,
    CueShown,
    Line,
    acknowledged,
)
from scope_lab.soak.schedule import Cue
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Receipt
from scope_rt.session import StreamSession


class Steering:
    """A person at the controls of `session`, who has read the event log `before`."""

    def __init__(
        self, cues: Sequence[Cue], session: StreamSession, log: AttemptLog, before: Sequence[Line]
    ) -> None:
        self._cues, self._session, self._log = cues, session, log
        self._receipts: dict[int, Receipt] = {}
        self._epoch = max((chunk.cache_epoch for chunk in acknowledged(before)), default=-1)
        sent, self._acknowledged = set[int](), dict[int, CueAcknowledged]()
        again = set[int]()
        for line in before:
            match line:
                case CueSent(cue=cue):
                    sent.add(cue)
                    again.add(cue)
                case CueAcknowledged(cue=cue):
                    self._acknowledged[cue] = line
                    again.discard(cue)
                case CueShown(cue=cue) | CueLost(cue=cue):
                    del self._acknowledged[cue]
        self._num_sent = len(sent)  # they are sent in order
        for number in sorted(again):
            self._send(cues[number])

    def send(self, num_shown: int) -> None:
        """Send what is due when `num_shown` chunks were shown."""
        due = self._cues[self._num_sent :]
        for cue in due:
            if cue.chunk > num_shown:
                return
            self._num_sent += 1
            self._send(cue)

    def check(self, chunk: Chunk) -> None:
        """Compare `chunk` with the cues that it must show."""
        for number, receipt in list(self._receipts.items()):
            ack = receipt.wait(0.0)
            if ack is not None:
                del self._receipts[number]
                self._acknowledged[number] = self._log.write(
                    CueAcknowledged,
                    cue=number,
                    chunk_index=ack.chunk_index,
                    superseded=ack.superseded,
                )
        for number, acknowledged_at in list(self._acknowledged.items()):
            if acknowledged_at.chunk_index <= chunk.chunk_index:
                del self._acknowledged[number]
                if self._shows(chunk, self._cues[number], acknowledged_at):
                    self._log.write(CueShown, cue=number)
                else:
                    self._log.write(CueLost, cue=number)
                    self._send(self._cues[number])
        self._epoch = chunk.cache_epoch

    def _shows(self, chunk: Chunk, cue: Cue, acknowledged_at: CueAcknowledged) -> bool:
        if chunk.chunk_index > acknowledged_at.chunk_index:
            return True  # a later cut has dropped the chunk that would have shown it
        is_prompt_shown = cue.prompt in (None, chunk.prompt) or acknowledged_at.superseded
        return is_prompt_shown and (chunk.cache_epoch > self._epoch or not cue.hard_cut)

    def _send(self, cue: Cue) -> None:
        self._log.write(CueSent, cue=cue.number)
        if cue.prompt is not None:
            self._receipts[cue.number] = self._session.prompt(cue.prompt, cue.transition)
        if cue.hard_cut:  # nothing is planned between the two
            cut = self._session.hard_cut()
            self._receipts.setdefault(cue.number, cut)
