"""A page as its user has it: what is on screen, what it says, what the browser complained of."""

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO

import numpy as np
from PIL import Image
from playwright.sync_api import Browser, ConsoleMessage, Page

WITHIN_S = 30.0

# The layer that is not off shows the picture: a live transport, or the still that was kept.
PICTURE = """() => {
  const layer = document.querySelector('.stage > :is(video, canvas):not(.off)');
  const canvas = document.createElement('canvas');
  canvas.width = layer.videoWidth ?? layer.width;
  canvas.height = layer.videoHeight ?? layer.height;
  if (!canvas.width || !canvas.height) return null;
  canvas.getContext('2d').drawImage(layer, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL('image/png').split(',')[1];
}"""


@dataclass(slots=True, kw_only=True)
class Watched:
    """One open page."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, browser: Browser, address: str, **context: object) -> "Watched":
        """A browser context of its own, as another person has one."""
        page = browser.new_context(**context).new_page()
        watched = cls(page=page)
        page.on("console", lambda message: watched._told(message))
        page.on("pageerror", lambda error: watched.complaints.append(str(error)))
        page.goto(address)
        return watched

    def _told(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def plays(self) -> bool:
        """A transport shows pictures now."""
        return bool(self.page.evaluate("document.querySelector('#still').matches('.off')"))

    def picture(self) -> np.ndarray:
        """The decoded frame that is on screen, uint8 RGB."""
        encoded = self.page.evaluate(PICTURE)
        assert encoded is not None, "nothing was ever shown"
        return np.asarray(Image.open(BytesIO(base64.b64decode(encoded))).convert("RGB"))

    def share_of(self, colour: str) -> float:
        """Share of the pixels in which `colour` stands out from both other primaries."""
        frame_HWC = self.picture().astype(int)
        wanted = ("red", "green", "blue").index(colour)
        others = [frame_HWC[..., k] for k in range(3) if k != wanted]
        return float((frame_HWC[..., wanted] > np.maximum(*others) + 50).mean())

    def until(self, said: str, condition: Callable[[], bool], within_s: float = WITHIN_S) -> float:
        """Seconds until `condition` held; fails by the name `said` where it never does."""
        began = time.monotonic()
        while not condition():
            waited_s = time.monotonic() - began
            assert waited_s < within_s, f"{said}: not within {within_s:g} s; {self.telling()}"
            self.page.wait_for_timeout(50)
        return time.monotonic() - began

    def telling(self) -> str:
        """What the page says of itself, for a failed wait."""
        parts = ("#state", "#mode", "#banners", "#receipt")
        return " | ".join(self.text(part).replace("\n", " ") for part in parts)

    def until_it_plays(self) -> float:
        return self.until("pictures", self.plays)

    def until_it_moves(self) -> None:
        """Waits until the frame on screen differs from what it was."""
        before_HWC = self.picture()
        self.until("a moving picture", lambda: not np.array_equal(before_HWC, self.picture()))

    def send(self, prompt: str, change: str = "now") -> None:
        """Types a prompt and presses Enter, as a person does."""
        self.page.locator(f"input[name=change][value={change}]").check()
        self.page.fill("#prompt", prompt)
        self.page.press("#prompt", "Enter")

    def until_shown(self) -> None:
        """Waits for the receipt of the last command to say when its picture came."""
        self.until("a receipt", lambda: "on screen after" in self.text("#receipt"))

    @property
    def chunk(self) -> int:
        return int(self.text("#mode").split()[1])

    @property
    def epoch(self) -> int:
        return int(self.text("#mode").split("epoch ")[1].split()[0])

    def close(self) -> None:
        self.page.context.close()
