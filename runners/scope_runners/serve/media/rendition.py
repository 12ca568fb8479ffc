"""Each frame is encoded once per rendition, on a thread of its own, while anybody watches it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from fractions import Fraction

from scope_runners.serve.media.encoder import Codec, Encoded, VideoEncoder, jpeg_of
from scope_runners.serve.media.frame import PlayedFrame

KEYFRAME_EVERY_S = 1.0
"""However many viewers ask, no more often."""
AGAIN_S = 1.0
"""After an encoder that failed; its viewers stay, and go on at the next one's keyframe."""
MOST_WAITING = 8
"""Frames for an encoder that is slower than they come; the oldest are dropped."""
_LOG = logging.getLogger(__name__)


class KeyframeRequests:
    """Whether the next frame is to be a keyframe. Pure: times come in, seconds of one clock."""

    def __init__(self) -> None:
        self._is_asked = False
        self._last_s = float("-inf")

    def ask(self) -> None:
        """Somebody cannot go on without one."""
        self._is_asked = True

    def take(self, now_s: float) -> bool:
        """Whether the frame that is encoded now is one."""
        if not self._is_asked or now_s - self._last_s < KEYFRAME_EVERY_S:
            return False
        self._is_asked, self._last_s = False, now_s
        return True


class Rendition:
    """One encoder and who gets what it makes."""

    def __init__(
        self, codec: Codec, *, width: int, height: int, fps: Fraction, clock: Callable[[], float]
    ) -> None:
        self.codec = codec
        self.num_dropped = 0
        """Frames that the encoder was too slow for."""
        self._encode_ms: deque[float] = deque(maxlen=256)
        self._size, self._fps, self._clock = (width, height), fps, clock
        self._changed = threading.Condition()
        self._waiting: deque[PlayedFrame] = deque()
        self._takers: list[Callable[[Encoded], None]] = []
        self._requests = KeyframeRequests()
        self._has_ended = False
        self._thread: threading.Thread | None = None

    @property
    def encode_ms(self) -> list[float]:
        """What its newest frames cost."""
        with self._changed:
            return list(self._encode_ms)

    def join(self, taker: Callable[[Encoded], None]) -> None:
        """`taker` gets every packet from now on, on the encoder's thread: it must not block."""
        with self._changed:
            self._takers.append(taker)
            self._requests.ask()
            if self._thread is None and not self._has_ended:
                name = f"encode {self.codec}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def leave(self, taker: Callable[[Encoded], None]) -> None:
        """It gets no more; after the last one the encoder ends. Idempotent."""
        with self._changed:
            if taker in self._takers:
                self._takers.remove(taker)
            self._changed.notify_all()

    def ask_for_key(self) -> None:
        """Somebody cannot go on without a keyframe."""
        with self._changed:
            self._requests.ask()

    def show(self, frame: PlayedFrame) -> None:
        """Encode it soon, where anybody watches; never blocks."""
        with self._changed:
            if self._thread is None:
                return
            if len(self._waiting) >= MOST_WAITING:
                self._waiting.popleft()
                self.num_dropped += 1
            self._waiting.append(frame)
            self._changed.notify_all()

    def close(self) -> None:
        """End the encoder."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(5.0)

    def _run(self) -> None:
        said = ""
        while True:
            try:
                self._encode_all()
                return
            except Exception as error:  # noqa: BLE001 - every viewer would freeze
                if repr(error) != said:
                    said = repr(error)
                    _LOG.error("%s cannot be encoded here: %s", self.codec, said, exc_info=error)
            with self._changed:
                self._requests.ask()
                self._changed.wait_for(lambda: self._has_ended, AGAIN_S)

    def _encode_all(self) -> None:
        """Until nobody watches."""
        encode = self._encoder()
        while (job := self._next()) is not None:
            frame, takers, as_key = job
            start_s = time.perf_counter()
            encoded = encode(frame, as_key)
            with self._changed:
                self._encode_ms.append((time.perf_counter() - start_s) * 1e3)
            if encoded is not None:
                for taker in takers:
                    taker(encoded)

    def _next(self) -> tuple[PlayedFrame, list[Callable[[Encoded], None]], bool] | None:
        with self._changed:
            while not self._waiting or not self._takers or self._has_ended:
                if self._has_ended or not self._takers:
                    self._waiting.clear()
                    self._thread = None
                    return None
                self._changed.wait()
            frame = self._waiting.popleft()
            return frame, list(self._takers), self._requests.take(self._clock())

    def _encoder(self) -> Callable[[PlayedFrame, bool], Encoded | None]:
        if self.codec is Codec.JPEG:
            return lambda frame, as_key: jpeg_of(frame)
        width, height = self._size
        encoder = VideoEncoder(self.codec, width=width, height=height, fps=self._fps)
        return lambda frame, as_key: encoder.encode(frame, as_key=as_key)
