"""The page plays: by WebRTC, and by what is left where a browser or a network refuses that."""

import pytest
from playwright.sync_api import Browser

from tests.serve.browser.conftest import OpenPage
from tests.serve.browser.watching import Watched
from tests.serve.running_server import RunningServer

pytestmark = pytest.mark.lab


def test_page_plays_webrtc_and_complains_of_nothing(
    open_page: OpenPage, capsys: pytest.CaptureFixture[str]
) -> None:
    watched = open_page()
    first_picture_s = watched.until_it_plays()
    with capsys.disabled():
        print(f"\nfirst picture {first_picture_s:.2f} s after the page was open")  # noqa: T201
    video = "document.querySelector('#video')"
    assert watched.page.evaluate(f"{video}.videoWidth") >= 64
    before_s = watched.page.evaluate(f"{video}.currentTime")
    watched.until_it_moves()
    watched.until(
        "advancing time", lambda: watched.page.evaluate(f"{video}.currentTime") > before_s + 1
    )
    assert "WebRTC" in watched.text("#mode")
    assert watched.complaints == []


@pytest.mark.parametrize(("transport", "name"), [("fmp4", "fragmented MP4"), ("mjpeg", "MJPEG")])
def test_a_chosen_fallback_plays(open_page: OpenPage, transport: str, name: str) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.page.select_option("#transport", transport)
    watched.until("the other transport", lambda: watched.text("#mode").endswith(f"· {name}"))
    watched.until_it_plays()
    for _ in range(3):
        watched.until_it_moves()
    assert watched.complaints == []


def test_the_page_falls_back_by_itself_where_webrtc_is_refused(
    browser: Browser, served: RunningServer
) -> None:
    page = browser.new_context().new_page()
    page.route("**/whep", lambda route: route.abort())
    watched = Watched(page=page)
    page.goto(served.url)
    watched.until("fragments", lambda: watched.text("#mode").endswith("· fragmented MP4"))
    watched.until_it_moves()
    page.route("**/stream.fmp4", lambda route: route.abort())
    page.evaluate("delete window.MediaSource; delete window.ManagedMediaSource")
    watched.page.select_option("#transport", "mjpeg")
    watched.until("pictures", lambda: watched.text("#mode").endswith("· MJPEG"))
    watched.until_it_moves()
    watched.close()


def test_the_page_falls_back_by_itself_where_webrtc_is_agreed_and_nothing_arrives(
    browser: Browser, served: RunningServer
) -> None:
    page = browser.new_context().new_page()
    # As behind a firewall that drops UDP: the answer is never put to use.
    page.add_init_script("RTCPeerConnection.prototype.setRemoteDescription = async () => {}")
    watched = Watched(page=page)
    page.goto(served.url)
    watched.until("fragments", lambda: watched.text("#mode").endswith("· fragmented MP4"))
    watched.until_it_moves()
    watched.close()


def test_two_browsers_watch_and_both_are_told_of_a_prompt(open_page: OpenPage) -> None:
    first, second = open_page(), open_page()
    first.until_it_plays()
    second.until_it_plays()
    first.send("a green square, slow, on black")
    for watched in (first, second):
        watched.until("a green picture", lambda watched=watched: watched.share_of("green") > 0.02)  # type: ignore[misc]
        watched.until(
            "the prompt",
            lambda watched=watched: "a green square" in watched.text("#history"),  # type: ignore[misc]
        )
    assert first.complaints + second.complaints == []
