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
from numpy.typing import NDArray

from scope_contracts.errors import UserInputError
from scope_runners.serve.media.negotiation import apply_offer, close_peer, negotiating
from scope_runners.serve.media.newest_frames import NewestFrames

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
            with av.open(str(path)) as container:
                first = next(container.decode(video=0), None)
        except (av.FFmpegError, IndexError, OSError) as error:
            raise UserInputError(f"the input is no video that can be read ({error})") from error
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
            while not self._has_ended.is_set():
                self._play_once()
        except (av.FFmpegError, OSError) as error:
            _LOG.warning("video input %s ends: %s", self.name, error)

    def _play_once(self) -> None:
        began_s = time.monotonic()
        with av.open(str(self._path)) as container:
            for picture in container.decode(video=0):
                time_s = picture.time or 0.0
                if self._has_ended.wait(max(0.0, began_s + time_s - time.monotonic())):
                    return
                self._frames.add(picture, time_s)
        self._has_ended.wait(0.01)


class CameraSource:
    """A WebRTC track that a browser, or another WHIP client, sends; used on one event loop."""

    name = "camera"

    def __init__(self, frames: NewestFrames, *, on_end: Callable[["CameraSource"], None]) -> None:
        """`on_end` is called once its peer is gone."""
        self._frames, self._on_end = frames, on_end
        self._peer: RTCPeerConnection | None = None
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
            if peer.connectionState in ("failed", "closed"):
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
        """Nothing waits: the peer is ended by `leave`."""

    async def leave(self) -> None:
        """End the peer. Idempotent."""
        if self._reader is not None:
            self._reader.cancel()
        if self._peer is not None:
            await close_peer(self._peer)

    async def _read(self, track: Any) -> None:
        with contextlib.suppress(MediaStreamError):
            while True:
                picture = await track.recv()
                self._frames.add(picture, time.monotonic())
