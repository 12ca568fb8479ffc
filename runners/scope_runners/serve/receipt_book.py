"""Which commands of a session wait, and what became of the others; each change is in the journal
before anybody is told."""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scope_contracts.errors import UserInputError
from scope_runners.serve.journal import Fact, Journal
from scope_runners.serve.messages import CommandKind, Outcome
from scope_runners.serve.receipts import OF_RANK0, Receipt, ReceiptState

MOST_KEPT = 4096
"""Receipts of a session that can be asked for; older ones are forgotten."""
MOST_OPEN = 128
"""Commands of a session that may wait for their answer, the scheduled ones included."""


class ReceiptBook:
    """Any thread may use it."""

    def __init__(self, journal: Journal, tell: Callable[[Receipt], int]) -> None:
        """`tell` publishes a receipt and returns the number of its event."""
        self._journal, self._tell = journal, tell
        self._lock = threading.RLock()
        self._receipts: dict[str, Receipt] = {}
        self._unshown: dict[str, Receipt] = {}
        """Those that took effect, and whose chunk was not shown yet."""
        self._newest_prompt = ""

    def restore(self, fact: Fact, *, seq: int) -> None:
        """A receipt as an earlier server wrote it; whoever has not heard of `seq` is told of it:
        that server may have ended before it could tell."""
        receipt = replace(Receipt.from_plain(fact), seq=seq)
        self._receipts[receipt.id] = receipt
        self._see_prompt(receipt)

    def shorten(self, others: Sequence[Fact]) -> None:
        """Let the journal say all receipts that are kept, and `others`, which nobody changes
        meanwhile."""
        with self._lock:
            mine = [{"fact": "receipt", **each.to_plain()} for each in self._receipts.values()]
            self._journal.replace([*others, *mine])

    def all(self) -> tuple[Receipt, ...]:
        """In the order in which the commands came."""
        with self._lock:
            return tuple(self._receipts.values())

    def get(self, command_id: str) -> Receipt | None:
        """None where no such command is known."""
        return self._receipts.get(command_id)

    @property
    def newest_prompt(self) -> str:
        """Of those that took effect; "" where none did."""
        return self._newest_prompt

    def note(
        self,
        kind: CommandKind,
        fields: Mapping[str, Any],
        *,
        command_id: str | None,
        at_chunk: int = -1,
    ) -> tuple[Receipt, bool]:
        """Write a command down; returns its receipt, and whether it is new.

        Raises:
            UserInputError: too many wait for an answer, or the id is one of another command.
        """
        with self._lock:
            if command_id is not None and (known := self._receipts.get(command_id)) is not None:
                if known.kind is not kind or dict(known.fields) != dict(fields):
                    raise UserInputError(
                        f"the id {command_id!r} is that of another command; give each its own"
                    )
                return known, False
            if sum(each.is_open for each in self._receipts.values()) >= MOST_OPEN:
                raise UserInputError(
                    f"{MOST_OPEN} commands wait for their answer; post this one again once some "
                    "are answered"
                )
            receipt = Receipt(
                id=command_id or uuid.uuid4().hex,
                kind=kind,
                fields=dict(fields),
                at_chunk=at_chunk,
                posted_at=time.time(),
            )
            receipt = self._keep(receipt)
            self._trim()
            return receipt, True

    def answer(self, outcome: Outcome) -> None:
        """Rank0, or the server, has said what became of a command; the first answer stands."""
        with self._lock:
            receipt = self._receipts.get(outcome.command_id)
            if receipt is None or not receipt.is_open:
                return
            receipt = self._keep(receipt.answered(outcome, now=time.time()))
            if receipt.state is ReceiptState.APPLIED and receipt.kind in OF_RANK0:
                self._unshown[receipt.id] = receipt

    def post_now(self, receipt: Receipt) -> None:
        """A scheduled command is posted: its latency counts from here."""
        with self._lock:
            self._keep(replace(receipt, at_chunk=-1, posted_at=time.time()))

    def shown(self, chunk_index: int) -> list[Receipt]:
        """The first picture of a chunk is shown; returns the receipts that waited for it."""
        with self._lock:
            due = [each for each in self._unshown.values() if each.chunk_index <= chunk_index]
            shown = []
            for receipt in due:
                del self._unshown[receipt.id]
                shown.append(self._keep(receipt.shown(now=time.time())))
            return shown

    def to_send(self) -> list[Receipt]:
        """What rank0 has not answered and is to take now, in order."""
        with self._lock:
            mine = (each for each in self._receipts.values() if each.kind in OF_RANK0)
            return [each for each in mine if each.is_open and each.at_chunk < 0]

    def due(self, chunk_index: int) -> list[Receipt]:
        """What is scheduled up to this chunk."""
        with self._lock:
            open_ones = (each for each in self._receipts.values() if each.is_open)
            return [each for each in open_ones if 0 <= each.at_chunk <= chunk_index]

    def refuse_unobeyed(self) -> None:
        """What an earlier server took, and ended before it was done; rank0 answers the rest."""
        with self._lock:
            for receipt in [each for each in self._receipts.values() if each.is_open]:
                if receipt.kind not in OF_RANK0:
                    why = "the server ended before it was done; post it again"
                    self.answer(Outcome(command_id=receipt.id, error=why))

    def close(self, why: str) -> None:
        """No command takes effect any more."""
        with self._lock:
            for receipt in [each for each in self._receipts.values() if each.is_open]:
                self.answer(Outcome(command_id=receipt.id, error=why))

    def _keep(self, receipt: Receipt) -> Receipt:
        self._journal.append({"fact": "receipt", **receipt.to_plain()})
        receipt = replace(receipt, seq=self._tell(receipt))
        self._receipts[receipt.id] = receipt
        self._see_prompt(receipt)
        return receipt

    def _see_prompt(self, receipt: Receipt) -> None:
        if receipt.kind is CommandKind.PROMPT and receipt.state is ReceiptState.APPLIED:
            self._newest_prompt = str(receipt.fields["text"])

    def _trim(self) -> None:
        answered: Iterable[str] = [k for k, each in self._receipts.items() if not each.is_open]
        for name in list(answered)[: max(0, len(self._receipts) - MOST_KEPT)]:
            del self._receipts[name]
