"""What the page is told of a stream, a person is told; tests add events to the server's."""

import json
from typing import Any

import pytest
from playwright.sync_api import Browser, WebSocketRoute

from tests.serve.browser.watching import Watched
from tests.serve.running_server import RunningServer

pytestmark = pytest.mark.lab


class Told:
    """A page whose events come through here."""

    def __init__(self, browser: Browser, served: RunningServer) -> None:
        page = browser.new_context().new_page()
        self._sockets: list[WebSocketRoute] = []
        page.route_web_socket("**/events*", self._open)
        self.watched = Watched(page=page)
        page.goto(served.url)
        self.watched.until_it_plays()
        self._session = served.get("/v1/sessions")[0]

    def _open(self, socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()
        server.on_message(
            lambda message: None if b'"state"' in _raw(message) else socket.send(message)
        )
        self._sockets.append(socket)

    def tell(self, **event: Any) -> None:
        self._sockets[-1].send(json.dumps({"seq": 0, **event}))

    def become(self, state: str, detail: str) -> None:
        session = {**self._session, "state": state, "detail": detail}
        self.tell(type="state", session=session)


def _raw(message: str | bytes) -> bytes:
    head = message.encode() if isinstance(message, str) else message
    return head[:200].replace(b" ", b"").replace(b'"type":"state"', b'"state"')


@pytest.mark.parametrize(
    ("state", "detail", "said"),
    [
        ("recovering", "rank 1 was ended by SIGKILL", "Recovering: rank 1 was ended by SIGKILL."),
        ("degraded", "shows 9.1 of 16 frames a second", "Degraded: shows 9.1 of 16 frames"),
        ("stopped", "nobody asked for it", "The session has stopped: nobody asked for it."),
        ("failed", "its ranks ended with 70", "The session has failed: its ranks ended with 70."),
    ],
)
def test_every_state_that_is_not_well_is_told_over_the_last_picture(
    browser: Browser, served: RunningServer, state: str, detail: str, said: str
) -> None:
    told = Told(browser, served)
    watched = told.watched
    told.become(state, detail)
    watched.until("the banner", lambda: said in watched.text("#banners"))
    assert watched.text("#state").lower() == state
    assert watched.picture().max() > 0
    told.become("live", "live")
    watched.until("its end", lambda: said not in watched.text("#banners"))
    watched.until_it_plays()
    watched.close()


def test_a_retraction_names_its_chunks_until_it_is_closed(
    browser: Browser, served: RunningServer
) -> None:
    told = Told(browser, served)
    watched = told.watched
    watched.until("chunks", lambda: watched.page.locator(".cell").count() >= 2)
    chunk = int(watched.page.locator(".cell").first.get_attribute("data-chunk") or "-1")
    told.tell(type="retracted", first_chunk=chunk, last_chunk=chunk, reason="digests differ")
    watched.until("it", lambda: f"Chunk {chunk} was retracted" in watched.text("#banners"))
    told.become("live", "live")
    assert "digests differ" in watched.text("#banners")
    assert watched.page.locator(".cell.retracted").count() == 1
    watched.page.click("#banners button:text('Close')")
    assert watched.text("#banners") == ""
    watched.close()
