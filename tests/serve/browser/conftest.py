"""A file of tests shares one server and one Chromium; it is skipped where there is no Chromium."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.serve.browser.serving import Served, free_port
from tests.serve.browser.watching import Watched

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
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("s")
    server = Served(folder=folder, port=free_port())
    server.start()
    yield server
    server.end()


@pytest.fixture
def open_page(browser: Browser, served: Served) -> Iterator[OpenPage]:
    """Opens pages of the server, and closes them after the test."""
    opened: list[Watched] = []

    def open_one(**context: object) -> Watched:
        opened.append(Watched.open(browser, served.address, **context))
        return opened[-1]

    yield open_one
    for watched in opened:
        watched.close()
