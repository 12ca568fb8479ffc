"""What rank0 showed survives rank0: one line a chunk, whole or not there.

A stream that goes on after a restart tells of all its chunks, an earlier process's too.
"""

import base64
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from scope_runners.summary import ChunkRecord


class Journal:
    """A file of JSON lines: a `ChunkRecord` and, for some, a picture uint8 `[H, W, 3]`."""

    def __init__(self, path: Path) -> None:
        """Go on after what is there."""
        self.path = path
        self._file = path.open("ab")

    @classmethod
    def open(
        cls, path: Path, *, num_chunks: int | None
    ) -> tuple[Self, list[tuple[ChunkRecord, NDArray[np.uint8] | None]]]:
        """Go on after the first `num_chunks` lines, which are returned; None keeps all."""
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith(b"\n")][:num_chunks]
        journal = cls(path)
        os.truncate(path, sum(map(len, kept)))
        return journal, [_entry(json.loads(line)) for line in kept]

    def add(self, chunk: ChunkRecord, picture_HWC: NDArray[np.uint8] | None) -> None:
        """One more chunk."""
        line = {"chunk": asdict(chunk)}
        if picture_HWC is not None:
            raw = base64.b64encode(picture_HWC.tobytes()).decode()
            line["picture"] = {"shape": picture_HWC.shape, "raw": raw}
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def remove(self) -> None:
        """The stream is told in full elsewhere."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def _entry(line: dict[str, dict[str, object]]) -> tuple[ChunkRecord, NDArray[np.uint8] | None]:
    chunk = ChunkRecord(**line["chunk"])  # type: ignore[arg-type]
    if "picture" not in line:
        return chunk, None
    raw = base64.b64decode(str(line["picture"]["raw"]))
    return chunk, np.frombuffer(raw, np.uint8).reshape(line["picture"]["shape"])  # type: ignore[call-overload]
