"""Anyone can use the page: by keyboard, on a phone, in dark and light, without motion."""

from typing import Any

import pytest

from tests.serve.browser.conftest import OpenPage

pytestmark = pytest.mark.lab

DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_axe_finds_no_serious_violation(
    open_page: OpenPage, scheme: str, viewport: dict[str, int]
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="extra dev: axe")
    watched = open_page(color_scheme=scheme, viewport=viewport)
    watched.until_it_plays()
    watched.send("a red circle", "soft")
    watched.page.click("#timeline-add")
    watched.until("a stage", lambda: watched.page.locator(".stages li").count() > 0)
    found: list[dict[str, Any]] = axe.Axe().run(watched.page).response["violations"]
    serious = [
        (violation["id"], [node["html"] for node in violation["nodes"]])
        for violation in found
        if violation["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_a_phone_scrolls_down_only(open_page: OpenPage) -> None:
    watched = open_page(viewport=PHONE)
    watched.until_it_plays()
    watched.page.click("#timeline-add")
    width = watched.page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"]


def test_every_shortcut_is_listed_and_none_acts_while_typing(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.page.keyboard.press("/")
    assert watched.page.evaluate("document.activeElement.id") == "prompt"
    watched.page.keyboard.type("x r ?")
    assert watched.page.input_value("#prompt") == "x r ?"
    assert not watched.page.is_visible("#help")
    watched.page.keyboard.press("Escape")
    watched.page.keyboard.press("?")
    assert watched.page.is_visible("#help")
    listed = watched.page.locator("#help-list kbd").all_inner_texts()
    assert {"/", "Space", "x", "r", "[", "w", "f", "?"} == set(listed)


def test_the_strip_is_walked_by_keyboard(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.until("chunks", lambda: watched.page.locator(".cell").count() >= 3)
    watched.page.keyboard.press("[")
    watched.page.keyboard.press("ArrowLeft")
    watched.page.keyboard.press("ArrowLeft")
    chosen = watched.page.locator("#strip [aria-selected=true]")
    assert chosen.get_attribute("data-chunk") == watched.page.input_value("#chunk")


def test_nothing_moves_by_itself_where_motion_is_not_wanted(open_page: OpenPage) -> None:
    watched = open_page(reduced_motion="reduce")
    watched.until_it_plays()
    assert watched.page.evaluate("document.getAnimations().length") == 0
