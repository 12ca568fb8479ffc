"""Where the server has a token, its page is opened once with it, and never shows it again."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.serve.browser.watching import Watched
from tests.serve.running_server import RunningServer, running_server

pytestmark = pytest.mark.lab

TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    arguments = ["--prompt", "a red circle, slow, on black", "--token", TOKEN]
    folder = tmp_path_factory.mktemp("s")
    with running_server(folder, *arguments, "--max-viewers", "2") as server:
        yield server


def test_a_page_that_was_opened_with_the_token_plays_by_every_transport(
    browser: Browser, guarded: RunningServer
) -> None:
    watched = Watched.open(browser, f"{guarded.url}/?token={TOKEN}")
    watched.until_it_plays()
    assert TOKEN not in watched.page.url
    for transport in ("fmp4", "mjpeg", "webrtc"):
        watched.page.select_option("#transport", transport)
        watched.until("it", lambda: "connecting" not in watched.text("#mode"))
        watched.until_it_plays()
        watched.until_it_moves()
    watched.send("a green square, slow, on black")
    watched.until_shown()
    watched.page.goto(guarded.url)
    watched.until_it_plays()
    assert watched.complaints == []
    watched.close()


def test_a_page_whose_cookie_is_gone_says_how_to_open_it(
    browser: Browser, guarded: RunningServer
) -> None:
    watched = Watched.open(browser, f"{guarded.url}/?token={TOKEN}")
    watched.until_it_plays()
    watched.page.context.clear_cookies()
    watched.page.select_option("#transport", "mjpeg")
    watched.until("word of it", lambda: "token" in watched.text("#banners"))
    watched.close()


def test_a_viewer_too_many_is_told_so_and_plays_once_there_is_room(
    browser: Browser, guarded: RunningServer
) -> None:
    first, second = (Watched.open(browser, f"{guarded.url}/?token={TOKEN}") for _ in range(2))
    first.until_it_plays()
    second.until_it_plays()
    third = Watched.open(browser, f"{guarded.url}/?token={TOKEN}")
    third.until("the limit", lambda: "2 viewers watch already" in third.text("#banners"))
    first.page.goto("about:blank")
    third.until_it_plays()
    third.until("the end of the banner", lambda: third.text("#banners") == "")
    for watched in (first, second, third):
        watched.close()
