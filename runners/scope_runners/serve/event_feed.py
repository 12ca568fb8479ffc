"""A client hears the state, every receipt that it lacks, and then each event; where it was too slow
for all of them, it is told the state and those receipts again.

Receipts come in the order of their numbers, and the state under none that is later: a client whose
connection ends at any moment lacks nothing that is below the last number it has heard.
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.concurrency import run_in_threadpool

from scope_runners.serve.events import Event
from scope_runners.serve.session import LiveSession

Send = Callable[[Event], Awaitable[None]]


async def feed(session: LiveSession, send: Send, *, after: int) -> None:
    """Until the session is no more, or `send` raises, which sends one event and waits while the
    client is behind.

    `after` is the last number that the client has heard before; 0 for none.
    """
    listener = session.events.join(asyncio.get_running_loop())
    try:
        told = session.events.next_seq - 1
        await _state(session, send, seq=after)
        await _receipts(session, send, after=after, with_open=True)
        while True:
            event, has_missed = await listener.next()
            if event is None:
                return
            if has_missed:
                await _state(session, send, seq=told)
                await _receipts(session, send, after=told, with_open=False)
            await send(event)
            told = event["seq"]
            session.renew()
    finally:
        session.events.leave(listener)


async def _state(session: LiveSession, send: Send, *, seq: int) -> None:
    view = await run_in_threadpool(session.view)
    await send({"seq": seq, "type": "state", "session": view})


async def _receipts(session: LiveSession, send: Send, *, after: int, with_open: bool) -> None:
    for receipt in sorted(session.receipts.all(), key=lambda receipt: receipt.seq):
        if receipt.seq > after or (with_open and receipt.is_open):
            told = {"seq": receipt.seq, "type": "receipt", "receipt": receipt.to_plain()}
            await send(told)
