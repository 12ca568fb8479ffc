"""No receipt is missed: by a client that is slow, or by one that comes back to another server."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from scope_runners.serve.api_commands import serve_channel
from scope_runners.serve.api_state import Api
from scope_runners.serve.event_feed import feed
from scope_runners.serve.events import Event
from scope_runners.serve.journal import Journal
from scope_runners.serve.messages import CommandKind, Outcome
from scope_runners.serve.receipts import Receipt
from scope_runners.serve.session import LiveSession
from scope_runners.serve.sessions import Sessions
from scope_runners.serve.settings import ServeSettings
from tests.serve.lone_session import BOUND_S, session_in, without_processes


@pytest.fixture(autouse=True)
def nothing_runs() -> Iterator[None]:
    with without_processes():
        yield


@pytest.fixture
def session(tmp_path: Path) -> Iterator[LiveSession]:
    session = session_in(tmp_path / "session")
    yield session
    session.end("the test ends")


class LeftError(Exception):
    """Of a client."""


def heard(
    session: LiveSession,
    *,
    after: int = 0,
    most: int = 10**6,
    until: Callable[[Event], bool],
    meanwhile: Sequence[Callable[[], object]] = (),
) -> list[Event]:
    """What a client is told up to an event, or to the `most`th; something is done while it reads
    its first, its second, ..."""
    told: list[Event] = []

    async def send(event: Event) -> None:
        if len(told) < len(meanwhile):
            meanwhile[len(told)]()
            await asyncio.sleep(0)  # the events of it are put into its queue
        told.append(event)
        if until(event) or len(told) >= most:
            raise LeftError

    async def listen() -> None:
        async with asyncio.timeout(BOUND_S):
            with suppress(LeftError):
                await feed(session, send, after=after)

    asyncio.run(listen())
    return told


def receipts_in(events: list[Event]) -> list[tuple[str, str]]:
    return [
        (each["receipt"]["id"], str(each["receipt"]["state"]))
        for each in events
        if each["type"] == "receipt"
    ]


def is_last(event: Event) -> bool:
    return (event["type"], event.get("stats")) == ("stats", "last")


def last_of(session: LiveSession) -> Callable[[], object]:
    return lambda: session.events.publish("stats", stats="last")


def test_a_client_that_was_too_slow_for_all_events_gets_every_receipt(session: LiveSession) -> None:
    def begins() -> None:
        session.events.publish("stats", stats="first")

    def goes_on() -> None:
        session.post(CommandKind.PAUSE, {}, command_id="p")
        for _ in range(1000):
            session.events.publish("stats", stats={})
        last_of(session)()

    events = heard(session, until=is_last, meanwhile=(begins, goes_on))
    assert len(events) < 1000, "it has missed none"
    assert ("p", "applied") in receipts_in(events)


def test_an_answer_that_a_killed_server_told_nobody_of_is_told_by_the_next(tmp_path: Path) -> None:
    first = session_in(tmp_path / "session")
    first.post(CommandKind.HARD_CUT, {}, command_id="c")
    known = heard(first, until=lambda event: bool(receipts_in([event])))
    assert receipts_in(known) == [("c", "pending")]
    first.receipts.answer(Outcome(command_id="c", chunk_index=3, cache_epoch=1))
    later = session_in(tmp_path / "session")  # the first was killed: nobody has ended it
    newest = max(each["seq"] for each in known)
    events = heard(later, after=newest, until=is_last, meanwhile=[last_of(later)])
    assert receipts_in(events) == [("c", "applied")]
    later.end("the test ends")


def test_a_client_that_leaves_amid_the_receipts_gets_the_others_when_it_is_back(
    tmp_path: Path,
) -> None:
    first = session_in(tmp_path / "session")
    for number in range(6):
        first.post(CommandKind.PAUSE, {}, command_id=str(number))
    later = session_in(tmp_path / "session")
    told: list[Event] = []
    for _ in range(6):
        after = max((each["seq"] for each in told), default=0)
        told += heard(later, after=after, most=2, until=is_last)
    assert {name for name, _ in receipts_in(told)} == {str(number) for number in range(6)}
    later.end("the test ends")


def test_what_a_killed_server_had_not_done_is_refused_and_not_left_pending(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    session_in(folder).end("the test ends")
    journal, receipt = Journal(folder / "journal"), Receipt(id="p", kind=CommandKind.PAUSE)
    journal.append({"fact": "receipt", **receipt.to_plain()})
    journal.append({"fact": "receipt", **Receipt(id="c", kind=CommandKind.HARD_CUT).to_plain()})
    journal.close()
    later = session_in(folder)
    states = {each.id: (str(each.state), each.error) for each in later.receipts.all()}
    assert states["p"] == ("refused", "the server ended before it was done; post it again")
    assert states["c"] == ("pending", ""), "rank0 answers it"
    later.end("the test ends")


class UnreadChannel:
    """A data channel whose peer takes nothing until `bufferedAmount` falls."""

    readyState = "open"

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.bufferedAmount = 2**30
        self.has_closed = False

    def send(self, text: str) -> None:
        self.sent.append(text)

    def close(self) -> None:
        self.has_closed = True

    def on(self, name: str, call: Callable[..., object]) -> None: ...


def test_a_data_channel_that_is_not_read_holds_no_events(tmp_path: Path) -> None:
    async def listen() -> None:
        sessions = Sessions(ServeSettings(folder=tmp_path, max_viewers=1))
        session, channels = sessions.create("a", {}), [UnreadChannel() for _ in range(3)]
        for channel in channels:
            serve_channel(channel, Api(sessions), session)
            await asyncio.sleep(0.1)
        assert [each.has_closed for each in channels] == [False, False, True], "as many as may be"
        for _ in range(1000):
            session.events.publish("stats", stats={})
        await asyncio.sleep(0.2)
        assert channels[0].sent == []
        channels[0].bufferedAmount = 0
        async with asyncio.timeout(BOUND_S):
            while not channels[0].sent:
                await asyncio.sleep(0.01)
        sessions.close()

    asyncio.run(listen())
