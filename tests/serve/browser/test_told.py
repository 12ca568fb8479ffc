"""What the server does, allows and refuses is said on the page, and kept in its history."""

import os
import signal

import httpx
import pytest

from tests.serve.browser.conftest import OpenPage
from tests.serve.running_server import RunningServer

pytestmark = pytest.mark.lab


def test_the_prompt_shown_and_the_words_known_stand_by_the_video(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.until("words", lambda: "red, green, blue" in watched.text("#words"))
    watched.until("the bias", lambda: watched.text("#bias-value") == "1.00")
    watched.page.fill("#prompt", "a yellow tri")
    offered = "[...document.querySelectorAll('#word-list option')].map(option => option.value)"
    assert watched.page.evaluate(offered) == ["a yellow triangle"]
    watched.send("a yellow triangle, slow, on black")
    watched.until("it", lambda: watched.text("#now") == "a yellow triangle, slow, on black")
    watched.send("a shiny triangle")
    watched.until("a refusal", lambda: "'shiny'" in watched.text("#receipt"))
    assert watched.text("#now") == "a yellow triangle, slow, on black"


def test_fork_cannot_be_pressed_where_no_session_can_be_begun(
    open_page: OpenPage, served: RunningServer
) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.until("room", lambda: watched.page.is_enabled("#fork"))
    first = served.get("/v1/sessions")[0]["id"]
    other = served.post(f"/v1/sessions/{first}/fork", {"chunk_index": 0}).json()["id"]
    watched.until("no room", lambda: watched.page.is_disabled("#fork"))
    assert "2 of 2 sessions" in watched.text("#fork-note")
    httpx.delete(f"{served.url}/v1/sessions/{other}", timeout=60).raise_for_status()
    watched.until("room again", lambda: watched.page.is_enabled("#fork"))
    assert not watched.page.is_visible("#fork-note")


def test_a_refused_fork_stays_said_during_a_rewind(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.until("chunks", lambda: watched.chunk >= 4)
    watched.page.fill("#chunk", "3")
    watched.page.click("#rewind")
    watched.until("a rewind", lambda: "rewind to chunk 3" in watched.text("#history"))
    watched.page.fill("#chunk", "1000000")
    watched.page.click("#fork")
    watched.until("a refusal", lambda: "was not shown" in watched.text("#receipt"))
    watched.until_it_moves()
    watched.until("live", lambda: watched.text("#state") == "Live")
    assert "was not shown" in watched.text("#receipt")
    assert "fork from chunk 1000000" in watched.text("#history li:first-child")


def test_a_rewind_takes_the_chunks_that_it_undoes_off_the_strip(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    shown = "[...document.querySelectorAll('.cell')].map(cell => Number(cell.dataset.chunk))"
    watched.until("chunks", lambda: len(watched.page.evaluate(shown)) >= 6)
    before = watched.page.evaluate(shown)
    watched.page.fill("#chunk", str(before[2]))
    watched.page.click("#rewind")
    watched.until("fewer", lambda: len(watched.page.evaluate(shown)) < len(before))
    now = watched.page.evaluate(shown)
    assert now == sorted(set(now))
    assert now[:3] == before[:3]


def test_a_killed_rank_leaves_a_line_in_the_history(
    open_page: OpenPage, served: RunningServer
) -> None:
    watched = open_page()
    watched.until_it_plays()
    ranks = served.get("/v1/sessions")[0]["ranks"]
    os.kill(next(each["pid"] for each in ranks if each["rank"] == 1), signal.SIGKILL)
    watched.until("a line", lambda: "pictures again after" in watched.text("#history"))
    line = watched.text("#history li:first-child")
    assert "rank 1 was killed (SIGKILL)" in line
    assert "from chunk" in line
    watched.page.reload()
    watched.until("it again", lambda: "rank 1 was killed (SIGKILL)" in watched.text("#history"))


@pytest.mark.parametrize("size", [(1280, 800), (1600, 1000), (390, 844)])
def test_the_prompt_is_in_view_below_the_video_and_nothing_is_cut_off(
    open_page: OpenPage, size: tuple[int, int]
) -> None:
    watched = open_page(viewport={"width": size[0], "height": size[1]})
    watched.until_it_plays()
    watched.until("charts", lambda: watched.text(".chart .value")[0].isdigit())
    boxes = {name: watched.page.locator(name).bounding_box() for name in ("#stage", "#prompt")}
    stage, prompt = boxes["#stage"], boxes["#prompt"]
    assert stage is not None
    assert prompt is not None
    assert stage["y"] + stage["height"] <= prompt["y"]
    assert prompt["y"] + prompt["height"] <= size[1]
    cut_off = """() => [...document.querySelectorAll('.chart .value, .chart .name, button, #now')]
      .filter(each => each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 0)
      .map(each => each.textContent)"""
    assert watched.page.evaluate(cut_off) == []
    assert watched.page.evaluate("document.documentElement.scrollWidth") == size[0]
    if size[0] > 900:
        rows = {watched.page.locator(name).bounding_box()["y"] for name in ("#pause", "#seed")}
        assert len(rows) == 1, "the controls do not stand in one row"
