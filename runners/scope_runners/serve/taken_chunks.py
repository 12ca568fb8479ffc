"""Which chunks of its stream a server has taken for good: each once, in order, and in the journal
before rank0 is told."""

from scope_rt.record.runs import Runs
from scope_runners.serve.journal import Fact, Journal

TAKEN, FORGOT = "taken", "forgot"


class TakenChunks:
    """Used under the lock of its session."""

    def __init__(self) -> None:
        self._runs = Runs()
        self._journal: Journal | None = None

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def last(self) -> tuple[int, int]:
        """Index and epoch of the newest; -1 and -1 where there is none."""
        return self._runs.last

    def restore(self, fact: Fact) -> None:
        """What an earlier server noted; other facts are none of these."""
        if fact["fact"] == TAKEN:
            first = fact["chunk"]
            self._runs.add_span(first, fact.get("last", first), fact["epoch"])
        elif fact["fact"] == FORGOT:
            self._runs.forget(fact["chunk"])

    @property
    def facts(self) -> list[Fact]:
        """All of it, for a journal that is written anew."""
        return [_taken(first, last, epoch) for first, last, epoch in self._runs.spans]

    def note_in(self, journal: Journal) -> None:
        """From here on, what changes is appended there."""
        self._journal = journal

    def add(self, chunk_index: int, cache_epoch: int) -> bool:
        """Take a chunk; False where it was taken before."""
        if chunk_index <= self.last[0]:
            return False
        self._note(_taken(chunk_index, chunk_index, cache_epoch))
        self._runs.add(chunk_index, cache_epoch)
        return True

    def forget_from(self, chunk_index: int) -> bool:
        """Rank0 makes these again; False where none was taken."""
        if self.last[0] < chunk_index:
            return False
        self._note({"fact": FORGOT, "chunk": chunk_index})
        self._runs.forget(chunk_index)
        return True

    def _note(self, fact: Fact) -> None:
        if self._journal is not None:
            self._journal.append(fact)


def _taken(first: int, last: int, epoch: int) -> Fact:
    return {"fact": TAKEN, "chunk": first, "last": last, "epoch": epoch}
