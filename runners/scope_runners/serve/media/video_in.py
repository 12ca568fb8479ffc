"""A file or a camera gives pictures to a stream, at their own pace; the stream takes the newest."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import av
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection
from aiortc.mediastreams import MediaStreamError
from av.container import InputContainer
from numpy.typing import NDArray

from scope_contracts.errors import UserInputError
from scope_runners.serve.media.negotiation import (
    CONNECT_S,
    apply_offer,
    close_peer,
    negotiating,
)
from scope_runners.serve.media.newest_frames import NewestFrames

_FORMATS = (
    "mov,matroska,webm,avi,flv,asf,mpeg,mpegts,ogg,ivf,yuv4mpegpipe,h264,hevc,"
    "gif,apng,png_pipe,jpeg_pipe,webp_pipe"
)
"""FFmpeg's names of what an input may be: its other demuxers open files that the input names."""
_MOST_PIXELS = 2**25
"""Of a picture; 8K has fewer."""
_RATE = 25
"""Pictures a second of a file that does not say."""
_MOST_RATE = 240
"""Pictures a second, whatever a file says of their times."""
_LOG = logging.getLogger(__name__)


class Source(Protocol):
    """Where pictures come from."""

    @property
    def name(self) -> str:
        """For a person."""
        ...

    def newest(self, num_frames: int) -> NDArray[np.uint8] | None:
        """The newest `[T, H, W, 3]`; None where there is none."""
        ...

    def close(self) -> None:
        """Give no more."""
        ...


class FileSource:
    """A video that plays in a loop, on a thread of its own, from when it was opened."""

    def __init__(self, path: Path, frames: NewestFrames, *, name: str) -> None:
        """Raises `UserInputError`: it is no video."""
        self._path, self._frames, self.name = path, frames, name
        self._has_ended = threading.Event()
        try:
            with _opened(path) as container:
                first = next(container.decode(video=0), None)
        except (av.FFmpegError, IndexError, OSError, ValueError) as error:
            why = type(error).__name__  # its text names the server's folder
            raise UserInputError(f"the input is no video that can be read ({why})") from error
        if first is None:
            raise UserInputError("the input has no picture; send another video")
        frames.add(first, 0.0)
        self._thread = threading.Thread(target=self._play, name="video in", daemon=True)
        self._thread.start()

    def newest(self, num_frames: int) -> NDArray[np.uint8] | None:
        """As of `Source`."""
        return self._frames.newest(num_frames)

    def close(self) -> None:
        """End its thread, and remove the file."""
        self._has_ended.set()
        self._thread.join(5.0)
        self._path.unlink(missing_ok=True)

    def _play(self) -> None:
        try:
            while self._play_once() > 1:  # a single picture is there already
                continue
        except Exception as error:  # noqa: BLE001 - its last pictures stay
            _LOG.warning("video input %s stands still: %s", self.name, error)

    def _play_once(self) -> int:
        """From the first picture to the last; returns how many, 0 at the end of all."""
        began_s, number, time_s = time.monotonic(), 0, 0.0
        with _opened(self._path) as container:
            frame_s = 1 / float(container.streams.video[0].guessed_rate or _RATE)
            for number, picture in enumerate(container.decode(video=0), 1):
                time_s = max(_time_s(picture, number - 1, frame_s), (number - 1) / _MOST_RATE)
                if self._has_ended.wait(max(0.0, began_s + time_s - time.monotonic())):
                    return 0
                self._frames.add(picture, time_s)
        is_over = self._has_ended.wait(max(0.0, began_s + time_s + frame_s - time.monotonic()))
        return 0 if is_over else number


def _opened(path: Path) -> InputContainer:
    most = {"max_pixels": str(_MOST_PIXELS)}
    container = av.open(str(path), options={"format_whitelist": _FORMATS} | most)
    for stream in container.streams.video:
        stream.codec_context.options = most
    return container


def _time_s(picture: av.VideoFrame, number: int, frame_s: float) -> float:
    """Bare streams of pictures have no times of their own."""
    return number * frame_s if picture.time is None else picture.time


class CameraSource:
    """A WebRTC track that a browser, or another WHIP client, sends; used on one event loop, but for
    its end."""

    name = "camera"

    def __init__(self, frames: NewestFrames, *, on_end: Callable[["CameraSource"], None]) -> None:
        """`on_end` is called once its peer is gone."""
        self._frames, self._on_end = frames, on_end
        self._loop = asyncio.get_running_loop()
        self._leaving: asyncio.Task[None] | None = None
        self._peer: RTCPeerConnection | None = None
        self._connected = asyncio.Event()
        self._reader: Any = None

    async def answer(self, offer: str, configuration: RTCConfiguration) -> str:
        """Answer a sender's offer, as WHIP has it.

        Raises:
            UserInputError: the offer cannot be used, or sends no video.
        """
        peer = self._peer = RTCPeerConnection(configuration)
        peer.on("track", lambda track: tracks.append(track))
        tracks: list[Any] = []

        @peer.on("connectionstatechange")
        async def changed() -> None:
            if peer.connectionState == "connected":
                self._connected.set()
            elif peer.connectionState in ("failed", "closed"):
                self._connected.set()
                self._on_end(self)

        async with negotiating(peer):
            await apply_offer(peer, offer)
            videos = [track for track in tracks if track.kind == "video"]
            if not videos:
                raise UserInputError("the offer sends no video; offer sendonly video")
            await peer.setLocalDescription(await peer.createAnswer())
        self._reader = asyncio.create_task(self._read(videos[0]))
        return str(peer.localDescription.sdp)

    def newest(self, num_frames: int) -> NDArray[np.uint8] | None:
        """As of `Source`."""
        return self._frames.newest(num_frames)

    def close(self) -> None:
        """End the peer soon, from any thread: whoever gives a stream other pictures, or ends it,
        waits for no camera."""
        with contextlib.suppress(RuntimeError):  # its loop has ended, and the peer with it
            self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._end())

    async def _end(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._peer is not None:
            await close_peer(self._peer)

    async def _read(self, track: Any) -> None:
        try:
            await asyncio.wait_for(self._connected.wait(), CONNECT_S)
        except TimeoutError:
            _LOG.info("the camera has not connected within %g s", CONNECT_S)
            self._on_end(self)
            return
        with contextlib.suppress(MediaStreamError):
            while True:
                picture = await track.recv()
                self._frames.add(picture, time.monotonic())
