"""What a server told outlives it, and a journal that is not what it was is named."""

import os
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_runners.serve.journal import Journal, JournalError, read_journal, rewrite
from scope_runners.serve.messages import CommandKind, Outcome
from scope_runners.serve.receipt_book import MOST_OPEN, ReceiptBook
from scope_runners.serve.receipts import Receipt, ReceiptState, command_of
from tests.serve.lone_session import session_in, without_processes

FACTS = [{"fact": "taken", "chunk": n, "epoch": 0} for n in range(3)]


def written(path: Path) -> Path:
    journal = Journal(path)
    for fact in FACTS:
        journal.append(fact)
    journal.close()
    return path


def test_facts_come_back_in_order_and_more_are_appended(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    journal = Journal(path)
    journal.append({"fact": "more"})
    journal.close()
    assert list(read_journal(path)) == [*FACTS, {"fact": "more"}]


def test_a_line_that_was_cut_short_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    whole = path.read_bytes()
    for length in range(len(whole.splitlines(keepends=True)[0]) * 2, len(whole)):
        path.write_bytes(whole[:length])
        assert list(read_journal(path)) == FACTS[: 2 if length < len(whole) else 3]
    Journal(path).close()
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:2])


def test_damage_is_named_with_its_line(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserInputError, match="damaged in line 1"):
        list(read_journal(path))


def test_a_journal_is_written_anew_whole_or_not_at_all(tmp_path: Path) -> None:
    path = written(tmp_path / "journal")
    rewrite(path, FACTS[2:])
    assert list(read_journal(path)) == FACTS[2:]
    assert [each.name for each in tmp_path.iterdir()] == ["journal"]


def test_a_disk_that_takes_no_more_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "journal")
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: len(data) - 1)
    with pytest.raises(JournalError, match=r"cannot write .*No space left"):
        journal.append(FACTS[0])
    monkeypatch.undo()
    journal.close()


def test_a_line_that_a_full_disk_cut_short_damages_none_of_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pwrite = tmp_path / "journal", os.pwrite
    journal = Journal(path)
    journal.append(FACTS[0])
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:-7], at))
    with pytest.raises(JournalError):
        journal.append({"fact": "receipt", "text": "longer than what follows" * 9})
    monkeypatch.undo()
    for fact in FACTS[1:]:
        journal.append(fact)
        assert list(read_journal(path))[-1] == fact
    journal.close()
    assert list(read_journal(path)) == FACTS


def test_a_journal_that_was_let_go_writes_to_no_other_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.close()
    with (tmp_path / "other").open("wb") as other:  # which the system gives the same number
        journal.close()
        with pytest.raises(JournalError):
            journal.append(FACTS[0])
        other.write(b"mine")
    assert (tmp_path / "other").read_bytes() == b"mine"


class Book:
    """A receipt book with all that it told."""

    def __init__(self, path: Path) -> None:
        self.told: list[Receipt] = []
        self.book = ReceiptBook(Journal(path), self._tell)

    def _tell(self, receipt: Receipt) -> int:
        self.told.append(receipt)
        return len(self.told)


def test_a_command_that_is_posted_twice_counts_once(tmp_path: Path) -> None:
    book = Book(tmp_path / "journal").book
    first, is_new = book.note(CommandKind.PROMPT, {"text": "a"}, command_id="x")
    again, is_new_again = book.note(CommandKind.PROMPT, {"text": "a"}, command_id="x")
    assert (is_new, is_new_again) == (True, False)
    assert first == again
    with pytest.raises(UserInputError, match="'x' is that of another command"):
        book.note(CommandKind.PROMPT, {"text": "b"}, command_id="x")


def test_receipts_and_open_commands_outlive_their_server(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    book = Book(path).book
    book.note(CommandKind.PROMPT, {"text": "a"}, command_id="a")
    book.note(CommandKind.HARD_CUT, {}, command_id="b")
    book.answer(Outcome(command_id="a", chunk_index=4, cache_epoch=1))
    later = Book(tmp_path / "later").book
    for fact in read_journal(path):
        plain = {name: value for name, value in fact.items() if name != "fact"}
        later.restore(plain, seq=9)
    assert [(each.id, each.state, each.chunk_index) for each in later.all()] == [
        ("a", ReceiptState.APPLIED, 4),
        ("b", ReceiptState.PENDING, -1),
    ]
    assert [command_of(each).command_id for each in later.to_send()] == ["b"]


def test_the_first_answer_stands_and_every_change_is_told(tmp_path: Path) -> None:
    noted = Book(tmp_path / "journal")
    noted.book.note(CommandKind.SEED, {"seed": 3}, command_id="s")
    noted.book.answer(Outcome(command_id="s", error="no"))
    noted.book.answer(Outcome(command_id="s", chunk_index=3, cache_epoch=0))
    noted.book.answer(Outcome(command_id="unknown", chunk_index=3, cache_epoch=0))
    assert [each.state for each in noted.told] == [ReceiptState.PENDING, ReceiptState.REFUSED]


def test_latency_ends_with_the_first_picture_of_the_chunk_or_of_one_after_it(
    tmp_path: Path,
) -> None:
    book = Book(tmp_path / "journal").book
    book.note(CommandKind.PROMPT, {"text": "a"}, command_id="a")
    book.answer(Outcome(command_id="a", chunk_index=4, cache_epoch=0))
    assert book.shown(3) == []
    (shown,) = book.shown(5)
    assert shown.latency_ms is not None
    assert book.shown(6) == []


def test_scheduled_commands_are_sent_at_their_chunk_and_not_before(tmp_path: Path) -> None:
    book = Book(tmp_path / "journal").book
    book.note(CommandKind.PROMPT, {"text": "a"}, command_id="a", at_chunk=7)
    assert book.to_send() == []
    assert book.due(6) == []
    (due,) = book.due(7)
    book.post_now(due)
    assert [each.id for each in book.to_send()] == ["a"]


def test_no_more_commands_wait_than_can_be_kept(tmp_path: Path) -> None:
    book = Book(tmp_path / "journal").book
    for number in range(MOST_OPEN):
        book.note(CommandKind.HARD_CUT, {}, command_id=str(number))
    with pytest.raises(UserInputError, match=f"{MOST_OPEN} commands wait"):
        book.note(CommandKind.HARD_CUT, {}, command_id="more")
    book.close("the session was deleted")
    assert {each.error for each in book.all()} == {"the session was deleted"}


def test_a_long_journal_is_written_anew_and_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scope_runners.serve.journal.MOST_APPENDED", 50)
    with without_processes():
        session = session_in(tmp_path)
        session.post(CommandKind.PAUSE, {}, command_id="p")
        session.post(CommandKind.HARD_CUT, {}, command_id="c")
        for index in range(200):
            session.taken.add(index, index // 150)
        for text in range(200):
            session.receipts.note(CommandKind.RESUME, {}, command_id=str(text))
            session.receipts.answer(Outcome(command_id=str(text), chunk_index=1, cache_epoch=0))
        long = session.files.journal.stat().st_size
        session.look()
        assert session.files.journal.stat().st_size < long
        session.taken.add(200, 1)
        later = session_in(tmp_path)
        assert (len(later.taken), later.taken.last) == (201, (200, 1))
        assert later.view()["paused"]
        assert [(r.id, r.state) for r in later.receipts.all()] == [
            (r.id, r.state) for r in session.receipts.all()
        ]


def test_a_journal_that_cannot_be_written_anew_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, facts: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "journal"
    journal = Journal(path)
    journal.append(FACTS[0])
    monkeypatch.setattr("scope_runners.serve.journal.rewrite", full)
    journal.replace([])
    journal.append(FACTS[1])
    journal.close()
    assert list(read_journal(path)) == FACTS[:2]
