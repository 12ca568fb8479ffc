"""A page outlives every rank and the server: it says so, and plays again without a reload."""

import os
import signal
import time

import pytest

from tests.serve.browser.conftest import OpenPage
from tests.serve.browser.watching import Watched
from tests.serve.running_server import RunningServer

pytestmark = pytest.mark.lab

PLAYS_AGAIN_WITHIN_S = 60.0


def mark(watched: Watched) -> None:
    """What a reload would lose."""
    watched.page.evaluate("window.neverReloaded = true")


def plays_on(watched: Watched) -> None:
    watched.until("live", lambda: watched.text("#state") == "Live", PLAYS_AGAIN_WITHIN_S)
    watched.until("pictures", watched.plays, PLAYS_AGAIN_WITHIN_S)
    watched.until_it_moves()
    assert watched.page.evaluate("window.neverReloaded")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_browsers_are_told_of_a_lost_rank_and_play_on(
    open_page: OpenPage,
    served: RunningServer,
    rank: int,
    how: signal.Signals,
    capsys: pytest.CaptureFixture[str],
) -> None:
    colour = "green" if rank == 0 else "blue"
    pages = [open_page(), open_page()]
    for watched in pages:
        watched.until_it_plays()
        mark(watched)
    ranks = served.session()["ranks"]
    os.kill(next(each["pid"] for each in ranks if each["rank"] == rank), how)
    lost_at_s = time.monotonic()
    for watched in pages:
        watched.until("word of the loss", lambda w=watched: "Recovering" in w.text("#state"))  # type: ignore[misc]
        assert watched.picture().max() > 0  # the last picture stays
    told_s = time.monotonic() - lost_at_s
    pages[0].send(f"a {colour} square, slow, on black")
    for watched in pages:
        plays_on(watched)
        after_s = time.monotonic() - lost_at_s
        watched.until(colour, lambda w=watched: w.share_of(colour) > 0.02)  # type: ignore[misc]
        assert not watched.page.is_visible(".banner[data-cause=state]")
    pages[0].until_shown()
    with capsys.disabled():
        print(f"\nrank {rank} {how.name}: told {told_s:.1f} s, plays {after_s:.1f} s")  # noqa: T201
    assert pages[0].complaints + pages[1].complaints == []


def test_a_page_outlives_the_server_and_gives_the_prompt_typed_meanwhile(
    open_page: OpenPage, served: RunningServer
) -> None:
    watched = open_page()
    watched.until_it_plays()
    mark(watched)
    before = {session["id"] for session in served.get("/v1/sessions")}
    served.kill()
    watched.until("word of the loss", lambda: "does not answer" in watched.text("#banners"))
    assert watched.picture().max() > 0
    watched.send("a blue triangle, slow, on black")
    watched.until("waiting", lambda: "aits for the server" in watched.text("#receipt"))
    served.start()
    assert before <= {session["id"] for session in served.get("/v1/sessions")}
    plays_on(watched)
    watched.until("blue", lambda: watched.share_of("blue") > 0.02)
    watched.until_shown()
    assert watched.page.locator("#history li", has_text="a blue triangle").count() == 1


def test_a_lost_webrtc_connection_is_made_again(open_page: OpenPage, served: RunningServer) -> None:
    watched = open_page()
    with watched.page.expect_response("**/whep") as answer:
        watched.page.reload()
    watched.until_it_plays()
    mark(watched)
    watched.page.request.delete(served.url + answer.value.headers["location"])
    watched.until("word of it", lambda: not watched.plays())
    assert watched.picture().max() > 0
    plays_on(watched)
