"""The page goes from one session to another, and from none to a new one."""

import httpx
import pytest

from tests.serve.browser.conftest import OpenPage
from tests.serve.running_server import RunningServer

pytestmark = pytest.mark.lab


def delete(served: RunningServer, session_id: str) -> None:
    httpx.delete(f"{served.url}/v1/sessions/{session_id}", timeout=60).raise_for_status()


def test_a_fork_is_opened_and_the_first_session_goes_on(
    open_page: OpenPage, served: RunningServer
) -> None:
    watched = open_page()
    watched.until_it_plays()
    first = watched.page.url
    watched.until("chunks", lambda: watched.chunk >= 3)
    watched.page.fill("#chunk", "2")
    watched.page.click("#fork")
    watched.until("another session", lambda: watched.page.url != first)
    watched.until("live", lambda: watched.text("#state") == "Live", 60)
    watched.until_it_plays()
    watched.until_it_moves()
    assert watched.chunk >= 2
    for size in ((390, 844), (1280, 800)):
        watched.page.set_viewport_size({"width": size[0], "height": size[1]})
        assert watched.page.is_visible("#session")
        assert watched.page.evaluate("document.documentElement.scrollWidth") == size[0]
    watched.page.select_option("#session", first.split("=")[1])
    watched.until("the first session", lambda: watched.page.url == first)
    watched.until_it_plays()
    watched.until_it_moves()
    assert watched.complaints == []
    fork = next(each["id"] for each in served.get("/v1/sessions") if each["forked_from"])
    delete(served, fork)


def test_a_session_that_was_deleted_is_told_and_a_new_one_is_started(
    open_page: OpenPage, served: RunningServer
) -> None:
    watched = open_page()
    watched.until_it_plays()
    for session in served.get("/v1/sessions"):
        delete(served, session["id"])
    watched.until("word of it", lambda: "no longer" in watched.text("#banners"))
    watched.page.click("#banners button")
    watched.until("the form", lambda: watched.page.is_visible("#start"))
    watched.page.fill("#start-prompt", "a yellow triangle, slow, on black")
    watched.page.press("#start-prompt", "Enter")
    watched.until("live", lambda: watched.text("#state") == "Live", 60)
    watched.until_it_plays()
    watched.until_it_moves()
