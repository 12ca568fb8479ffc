"""A recording has every frame that is shown from its start, in order; it slows nothing down, and a
process that is killed leaves it playable up to its last second or two."""

import json
import logging
import re
import threading
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
from av.video.reformatter import Interpolation
from av.video.stream import VideoStream

from scope_contracts.errors import UserInputError
from scope_contracts.retraction import Retraction
from scope_rt.disk import mend
from scope_runners.serve.media.encoder import encoded_size
from scope_runners.serve.media.frame import PlayedFrame

SUFFIX = ".mp4"
MOST_WAITING = 256
"""Frames that a disk may be behind before the recording ends."""
_END_S = 30.0
_MOST_CHUNKS = 4096
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LOG = logging.getLogger(__name__)


class Recording:
    """One file, written on a thread of its own; any thread may use it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        fps: Fraction,
        width: int,
        height: int,
        on_end: Callable[["Recording", str], None],
    ) -> None:
        """Creates the file. `on_end` is called once, with why it ended early, or "".

        Raises:
            UserInputError: the name cannot be used, or the disk cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise UserInputError("name: give 1 to 64 letters, digits, - or _")
        self.name, self.path = name, folder / f"{name}{SUFFIX}"
        self.num_frames = 0
        self._fps, self._on_end = fps, on_end
        self._retractions: list[dict[str, Any]] = []
        self._chunks: deque[tuple[int, int]] = deque(maxlen=_MOST_CHUNKS)
        """Index and epoch of those whose frames it has; no retraction reaches further back."""
        self._waiting: deque[PlayedFrame] = deque()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._why = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.path.open("xb").close()
        except FileExistsError:
            raise UserInputError(f"a recording {name!r} is there already; give another") from None
        except OSError as error:
            raise UserInputError(f"cannot record to {folder} ({error.strerror})") from error
        # Keyframes end fragments: what is whole of them plays, whatever comes after.
        options = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "flush_packets": "1"}
        self._container = av.open(str(self.path), "w", format="mp4", options=options)
        stream = self._container.add_stream(
            "libx264", rate=fps, options={"crf": "18", "preset": "veryfast", "tune": "zerolatency"}
        )
        assert isinstance(stream, VideoStream)
        stream.width, stream.height = encoded_size(width, height)
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = 1 / fps
        stream.codec_context.thread_count = 1
        stream.codec_context.gop_size = int(fps)
        self._stream = stream
        self._thread = threading.Thread(target=self._run, name=f"record {name}", daemon=True)
        self._thread.start()

    def show(self, frame: PlayedFrame) -> None:
        """Add a frame; never blocks."""
        with self._changed:
            if self._is_stopped:
                return
            if len(self._waiting) >= MOST_WAITING:
                self._why = f"the disk is {MOST_WAITING} frames behind; free it, and start another"
                self._is_stopped = True
            else:
                self._waiting.append(frame)
                chunk = frame.chunk_index, frame.cache_epoch
                if not self._chunks or self._chunks[-1] != chunk:
                    self._chunks.append(chunk)
            self._changed.notify_all()

    def retracted(self, retraction: Retraction) -> None:
        """Chunks are suspect: where it has any of them, a file beside it says so. Also after its
        end."""
        with self._changed:
            if not any(retraction.covers(*chunk) for chunk in self._chunks):
                return
            first, last = retraction.first_chunk, retraction.last_chunk
            self._retractions.append(
                {"first_chunk": first, "last_chunk": last, "reason": retraction.reason}
            )
            text = json.dumps({"retracted": self._retractions}, indent=2)
        try:
            self.path.with_suffix(".json").write_text(text + "\n")
        except OSError as error:
            _LOG.error("%s cannot say what was retracted: %s", self.path, error)

    def stop(self) -> None:
        """End it once what was shown is written."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when the file is whole; blocks `_END_S` at most."""
        self._thread.join(_END_S)

    def _run(self) -> None:
        why = ""
        try:
            while (frame := self._next()) is not None:
                self._write(frame)
            self._container.mux(self._stream.encode())
            self._container.close()
        except (av.FFmpegError, OSError) as error:
            why = f"it cannot be written ({error}); {mend(error)}, and start another"
        except Exception as error:  # noqa: BLE001 - it would run on without its thread
            _LOG.exception("the recording %s", self.name)
            why = f"it cannot be made ({type(error).__name__}: {error}); start another"
        self.stop()
        self._on_end(self, why or self._why)

    def _next(self) -> PlayedFrame | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_stopped)
            return self._waiting.popleft() if self._waiting else None

    def _write(self, frame: PlayedFrame) -> None:
        picture = av.VideoFrame.from_ndarray(frame.frame_HWC, format="rgb24").reformat(
            width=self._stream.width,
            height=self._stream.height,
            format="yuv420p",
            interpolation=Interpolation.POINT,
        )
        picture.pts = self.num_frames
        self._container.mux(self._stream.encode(picture))
        self.num_frames += 1


def recordings_in(folder: Path, *, under_way: set[str]) -> list[dict[str, Any]]:
    """What was recorded there, oldest first."""
    try:
        files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return []
    return [
        {"name": path.stem, "bytes": path.stat().st_size, "under_way": path.stem in under_way}
        for path in files
    ]


def recording_file(folder: Path, name: str) -> Path | None:
    """The file of a recording; None where there is none of that name."""
    path = folder / f"{name}{SUFFIX}"
    return path if _NAME.fullmatch(name) and path.is_file() else None
