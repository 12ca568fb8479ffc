"""What rank0 showed survives rank0: one line a chunk, whole or not there.

A stream that goes on after a restart tells of all its chunks, an earlier process's too, and only
the request that began it may go on with it.
"""

import base64
import errno
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scope_contracts.errors import RecordingError, UserInputError
from scope_rt.disk import STALL_TIMEOUT_S, DaemonExecutor, answer, remedy
from scope_runners.request import StreamRequest
from scope_runners.summary import ChunkRecord

_PUBLISHED: dict[str, object] = {"published": True}

Entry = tuple[ChunkRecord, NDArray[np.uint8] | None]
"""A chunk and, for some, its picture, uint8 `[H, W, 3]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the journal of an earlier process says."""

    begun: Mapping[str, object] | None
    """What was asked for, as `asked_for` puts it; None where there is no journal."""
    num_starts: int
    entries: tuple[Entry, ...]
    is_published: bool
    """Whether every chunk was on the way into the video's own file."""


def asked_for(request: StreamRequest) -> dict[str, object]:
    """What of a request makes another stream of the same settings; `--seconds` may change."""
    return {
        "--prompt": request.prompt,
        "--prompt-at": [f"{float(timed.at_s):g}s:{timed.prompt}" for timed in request.prompt_at],
        "--hard-cut-at": [f"{float(at_s):g}s" for at_s in request.hard_cut_at],
        "--transition": request.transition,
        "--transition-method": request.transition_method,
        "--transition-bias": request.transition_bias,
    }


def read(path: Path) -> Told:
    """What lies at `path`, up to its last whole line.

    Raises:
        UserInputError: the file cannot be read or is damaged.
    """
    begun, num_starts, published = None, 0, False
    entries: list[Entry] = []
    try:
        data = path.read_bytes() if path.exists() else b""
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            match json.loads(line):
                case {"begun": dict(request)}:
                    begun, num_starts = request, num_starts + 1
                case {"published": True}:
                    published = True
                case {"chunk": dict(chunk), **rest}:
                    entries.append((ChunkRecord(**chunk), _picture(rest.get("picture"))))
                case _:
                    raise ValueError(f"a line of {len(line)} bytes says nothing")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserInputError(
            f"the journal {path} is damaged ({error}); delete it to start the stream anew"
        ) from error
    return Told(begun=begun, num_starts=num_starts, entries=tuple(entries), is_published=published)


def check_same_stream(told: Told, request: StreamRequest, path: Path) -> None:
    """Refuse to go on with a stream that another request began.

    Raises:
        UserInputError: naming the flag that differs.
    """
    for flag, ours in asked_for(request).items():
        theirs = ours if told.begun is None else told.begun.get(flag)
        if theirs != ours:
            raise UserInputError(
                f"{flag} is {ours!r}, and the stream to resume was begun with {theirs!r}; use that "
                f"again, or delete {path} and the checkpoint beside it to start anew"
            )


class Journal:
    """The file while it grows: one line a start, one a chunk, one when all is published."""

    def __init__(
        self,
        path: Path,
        request: StreamRequest,
        kept: tuple[Entry, ...],
        num_starts: int,
        *,
        is_published: bool = False,
    ) -> None:
        """Begin anew with the chunks that stay; `num_starts` processes had it before this one.

        `is_published`: they are in the video's own file, and nowhere else any more.

        Raises:
            RecordingError: the file cannot be written.
        """
        self.path = path
        self._disk = DaemonExecutor("journal")
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb") as file:
                file.writelines([_line({"begun": asked_for(request)})] * (num_starts + 1))
                file.writelines(_line(_plain(*entry)) for entry in kept)
                file.writelines([_line(_PUBLISHED)] * is_published)
            os.replace(partial, path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise self._failure(error) from error

    def add(self, chunk: ChunkRecord, picture_HWC: NDArray[np.uint8] | None) -> None:
        """One more chunk. Raises `RecordingError`."""
        self._append(_plain(chunk, picture_HWC))

    def publish(self) -> None:
        """From now on all chunks may be in the video's own file. Raises `RecordingError`."""
        self._append(_PUBLISHED)

    def close(self) -> None:
        """Leave it to a process that goes on."""
        self._file.close()

    def remove(self) -> None:
        """The stream is told in full elsewhere."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _append(self, value: dict[str, object]) -> None:
        try:
            line = _line(value)
            written = self._disk.submit(self._file.write, line)
            if answer(written, timeout_s=STALL_TIMEOUT_S) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> RecordingError:
        return RecordingError(
            f"cannot write the journal {self.path} ({error.strerror}); {remedy(error)}"
        )


def _line(value: dict[str, object]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _plain(chunk: ChunkRecord, picture_HWC: NDArray[np.uint8] | None) -> dict[str, object]:
    if picture_HWC is None:
        return {"chunk": asdict(chunk)}
    raw = base64.b64encode(picture_HWC.tobytes()).decode()
    return {"chunk": asdict(chunk), "picture": {"shape": picture_HWC.shape, "raw": raw}}


def _picture(plain: Any) -> NDArray[np.uint8] | None:
    if plain is None:
        return None
    raw = base64.b64decode(str(plain["raw"]))
    return np.frombuffer(raw, np.uint8).reshape(plain["shape"])
