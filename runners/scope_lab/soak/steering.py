"""A cue is asked for until it was seen: what a crash has swallowed is asked for again.

The acknowledgement names a chunk, and the cue was seen when that chunk shows it. A rank0 that comes
back finds in the diary what was asked and acknowledged before.
"""

from collections.abc import Sequence

from scope_lab.soak.diary import Asked, Line, Log, Seen, Swallowed, Took, held
from scope_lab.soak.schedule import Cue
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Receipt
from scope_rt.session import StreamSession


class Steering:
    """A person at the controls of `session`, who has read the diary `before`."""

    def __init__(
        self, cues: Sequence[Cue], session: StreamSession, log: Log, before: Sequence[Line]
    ) -> None:
        self._cues, self._session, self._log = cues, session, log
        self._receipts: dict[int, Receipt] = {}
        self._epoch = max((chunk.cache_epoch for chunk in held(before)), default=-1)
        asked, self._took = set[int](), dict[int, Took]()
        again = set[int]()
        for line in before:
            match line:
                case Asked(cue=cue):
                    asked.add(cue)
                    again.add(cue)
                case Took(cue=cue):
                    self._took[cue] = line
                    again.discard(cue)
                case Seen(cue=cue) | Swallowed(cue=cue):
                    del self._took[cue]
        self._num_asked = len(asked)  # they are asked in order
        for number in sorted(again):
            self._ask(cues[number])

    def ask(self, num_shown: int) -> None:
        """Ask for what is due when `num_shown` chunks were shown."""
        coming = self._cues[self._num_asked :]
        for cue in coming:
            if cue.chunk > num_shown:
                return
            self._num_asked += 1
            self._ask(cue)

    def see(self, chunk: Chunk) -> None:
        """Look whether `chunk` shows what was asked for."""
        for number, receipt in list(self._receipts.items()):
            ack = receipt.wait(0.0)
            if ack is not None:
                del self._receipts[number]
                self._took[number] = self._log.tell(
                    Took, cue=number, chunk_index=ack.chunk_index, superseded=ack.superseded
                )
        for number, took in list(self._took.items()):
            if took.chunk_index <= chunk.chunk_index:
                del self._took[number]
                if self._shows(chunk, self._cues[number], took):
                    self._log.tell(Seen, cue=number)
                else:
                    self._log.tell(Swallowed, cue=number)
                    self._ask(self._cues[number])
        self._epoch = chunk.cache_epoch

    def _shows(self, chunk: Chunk, cue: Cue, took: Took) -> bool:
        if chunk.chunk_index > took.chunk_index:
            return True  # a later cut has dropped the chunk that would have shown it
        is_said = cue.prompt in (None, chunk.prompt) or took.superseded
        return is_said and (chunk.cache_epoch > self._epoch or not cue.hard_cut)

    def _ask(self, cue: Cue) -> None:
        self._log.tell(Asked, cue=cue.number)
        if cue.prompt is not None:
            self._receipts[cue.number] = self._session.prompt(cue.prompt, cue.transition)
        if cue.hard_cut:  # nothing is planned between the two
            cut = self._session.hard_cut()
            self._receipts.setdefault(cue.number, cut)
