"""Rank0's commands: each is posted to the stream once, however often a server sends it, and is
answered until a server has the answer."""

import threading
from collections.abc import Callable, Iterable
from functools import partial

from scope_contracts.errors import LinkError, ScopeError
from scope_rt.control.inbox import Receipt
from scope_runners.serve.messages import Applied, Command, Outcome

MOST_OUTCOMES = 4096
"""Answers that are kept for a server that comes back."""


class ObeyedCommands:
    """Any thread may use it."""

    def __init__(
        self, *, steer: Callable[[Command], Receipt], say: Callable[[Outcome], None]
    ) -> None:
        """`steer` posts a command to the stream, `say` sends an answer soon."""
        self._steer, self._say = steer, say
        self._lock = threading.Lock()
        self._outcomes: dict[str, Outcome | None] = {}
        """By command; None where it is posted and not answered."""

    def restore(self, applied: Iterable[Applied]) -> None:
        """What an earlier process of this stream has applied is not posted again."""
        with self._lock:
            for each in applied:
                self._outcomes[each.command_id] = Outcome(
                    command_id=each.command_id,
                    chunk_index=each.chunk_index,
                    cache_epoch=each.cache_epoch,
                )

    @property
    def answered(self) -> tuple[Outcome, ...]:
        """All answers that are kept, the oldest first."""
        with self._lock:
            return tuple(each for each in self._outcomes.values() if each is not None)

    def is_new(self, command: Command) -> bool:
        """Whether it was not seen before; one that was is answered again, as soon as it can be."""
        with self._lock:
            is_new = command.command_id not in self._outcomes
            outcome = self._outcomes.setdefault(command.command_id, None)
            while len(self._outcomes) > MOST_OUTCOMES:  # a server asks for none that old again
                del self._outcomes[next(iter(self._outcomes))]
        if outcome is not None:
            self._say(outcome)
        return is_new

    def refuse(self, command_id: str, why: str) -> None:
        """It is answered so, and not posted any more."""
        self._answer(Outcome(command_id=command_id, error=why))

    def post(self, command: Command) -> bool:
        """To the stream; whether that took it."""
        try:
            receipt = self._steer(command)
        except ScopeError as error:
            self.refuse(command.command_id, str(error))
            return False
        receipt.when_answered(partial(self._answered, command.command_id, receipt))
        return True

    def _answered(self, name: str, receipt: Receipt) -> None:
        try:
            ack = receipt.wait(0)
        except ScopeError as error:
            cause = error.__cause__
            if type(cause) is ScopeError or isinstance(cause, LinkError):
                return  # not taken by a stream that ends: whoever resumes it takes it
            self._answer(Outcome(command_id=name, error=str(error)))
            return
        assert ack is not None, "called once it is answered"
        self._answer(
            Outcome(
                command_id=name,
                chunk_index=ack.chunk_index,
                cache_epoch=ack.cache_epoch,
                superseded=ack.superseded,
            )
        )

    def _answer(self, outcome: Outcome) -> None:
        with self._lock:
            self._outcomes[outcome.command_id] = outcome
        self._say(outcome)
