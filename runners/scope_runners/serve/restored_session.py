"""What an earlier server left of a session in its journal, which is written anew with what still
matters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scope_runners.serve.journal import Fact, Journal, read_journal, rewrite
from scope_runners.serve.receipt_book import MOST_KEPT
from scope_runners.serve.session_files import SessionFiles
from scope_runners.serve.taken_chunks import TakenChunks


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredSession:
    """Of a new session: an empty journal, and nothing else."""

    journal: Journal
    taken: TakenChunks
    receipts: list[dict[str, Any]]
    """In the order in which the commands came."""
    is_paused: bool

    @classmethod
    def of(cls, files: SessionFiles) -> "RestoredSession":
        """Raises `UserInputError`: the journal is damaged."""
        path, taken, is_paused = files.journal, TakenChunks(), False
        receipts = dict[str, Mapping[str, Any]]()
        for fact in read_journal(path) if path.exists() else ():
            taken.restore(fact)
            if fact["fact"] == "receipt":
                receipts[fact["id"]] = fact
            elif fact["fact"] == "paused":
                is_paused = fact["is_paused"]
        answered = [name for name, fact in receipts.items() if fact["state"] != "pending"]
        for name in answered[: max(0, len(answered) - MOST_KEPT)]:
            del receipts[name]
        rewrite(path, [*taken.facts, *receipts.values(), paused(is_paused)])
        journal = Journal(path)
        taken.note_in(journal)
        plain = [{k: v for k, v in fact.items() if k != "fact"} for fact in receipts.values()]
        return cls(journal=journal, taken=taken, receipts=plain, is_paused=is_paused)


def paused(is_paused: bool) -> Fact:
    """That the stream stands still, or not."""
    return {"fact": "paused", "is_paused": is_paused}
