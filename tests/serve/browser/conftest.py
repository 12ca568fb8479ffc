"""A file of tests shares one server and one Chromium; it is skipped where there is no Chromium."""

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.serve.browser.watching import Watched
from tests.serve.running_server import RunningServer, running_server

# No sandbox: tests run as root in containers. The rest keeps Chromium from asking other hosts.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-features=WebRtcHideLocalIpsWithMdns",
    "--use-fake-device-for-media-stream",  # a camera where there is none
    "--use-fake-ui-for-media-stream",
]

OpenPage = Callable[..., Watched]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on the PATH (Debian's package chromium)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose session is live; the session is the only one so far."""
    arguments = ["--prompt", "a red circle, slow, on black", "--seed", "7", "--plan", "pp1"]
    with running_server(tmp_path_factory.mktemp("s"), *arguments, "--max-sessions", "2") as server:
        server.live()
        yield server


@pytest.fixture
def open_page(browser: Browser, served: RunningServer) -> Iterator[OpenPage]:
    """Opens pages of the server, and closes them after the test."""
    opened: list[Watched] = []

    def open_one(**context: object) -> Watched:
        opened.append(Watched.open(browser, served.url, **context))
        return opened[-1]

    yield open_one
    for watched in opened:
        watched.close()
