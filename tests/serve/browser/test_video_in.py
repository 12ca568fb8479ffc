"""Pictures that a person gives steer the stream: a file, and the browser's camera."""

from pathlib import Path

import av
import numpy as np
import pytest
from playwright.sync_api import Browser

from tests.serve.browser.conftest import OpenPage
from tests.serve.browser.watching import Watched
from tests.serve.running_server import RunningServer

pytestmark = pytest.mark.lab


def blue_video(path: Path) -> Path:
    """Two seconds of 64x64 pixels, all of them blue."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        frame_HWC = np.zeros((64, 64, 3), np.uint8)
        frame_HWC[..., 2] = 230
        for _ in range(32):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame_HWC, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_the_stream_follows_a_file_until_it_is_stopped(open_page: OpenPage, tmp_path: Path) -> None:
    watched = open_page()
    watched.until_it_plays()
    assert watched.share_of("blue") < 0.1
    watched.page.set_input_files("#input-file", blue_video(tmp_path / "blue.mp4"))
    watched.until("word of it", lambda: "follows the file" in watched.text("#input-note"))
    watched.until("blue everywhere", lambda: watched.share_of("blue") > 0.8)
    watched.page.click("#input-end")
    watched.send("a red circle, slow, on black", "cut")
    watched.until("the prompt alone", lambda: watched.share_of("blue") < 0.1)
    assert watched.complaints == []


def test_a_file_that_is_no_video_is_refused_in_a_sentence(
    open_page: OpenPage, tmp_path: Path
) -> None:
    (tmp_path / "words.mp4").write_text("no video at all")
    watched = open_page()
    watched.until_it_plays()
    watched.page.set_input_files("#input-file", tmp_path / "words.mp4")
    watched.until("a refusal", lambda: "no video" in watched.text("#input-note"))
    assert not watched.page.is_visible("#input-end")


def test_the_stream_follows_the_camera(browser: Browser, served: RunningServer) -> None:
    """Chromium's camera of its own: green, with a clock in it."""
    watched = Watched.open(browser, served.url, permissions=["camera"])
    watched.until_it_plays()
    watched.page.click("#input-camera")
    watched.until("word of it", lambda: "follows the camera" in watched.text("#input-note"))
    watched.until("green", lambda: watched.share_of("green") > 0.5)
    watched.page.click("#input-end")
    watched.until("its end", lambda: not watched.page.is_visible("#input-end"))
    assert watched.complaints == []
    watched.close()
