"""Progress is for a person at a terminal: elsewhere, and with --json, not a byte of it appears."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tqdm import tqdm

from scope_rt.control.chunk import Chunk


class ShowChunk(Protocol):
    """Shows that a chunk was made."""

    def __call__(self, chunk: Chunk) -> None: ...


@contextmanager
def progress_bar(num_frames: int, *, enabled: bool) -> Iterator[ShowChunk]:
    """A bar over `num_frames` on stderr, if that is a terminal."""
    with tqdm(
        total=num_frames,
        unit=" frames",
        unit_scale=False,
        disable=not (enabled and sys.stderr.isatty()),
        bar_format="{n_fmt}/{total_fmt} frames |{bar}| {rate_fmt}, {remaining} left{postfix}",
        leave=False,
        dynamic_ncols=True,
    ) as bar:

        def show(chunk: Chunk) -> None:
            bar.set_postfix_str(f"epoch {chunk.cache_epoch}: {chunk.prompt[:40]}", refresh=False)
            bar.update(len(chunk.frames))

        yield show
