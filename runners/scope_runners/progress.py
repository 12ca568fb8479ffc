"""Progress is for a person at a terminal: elsewhere, and with --json, not a byte of it appears.

Why tqdm and tables of our own, not `rich` (15.0, tried on the table of break-it): it adds four
wheels (1.7 MB, 13 MB installed; tqdm 0.6 MB); where output is no terminal, as in a log, it cuts the
table to 80 columns ("kill/f…"); and it prints a table when the last row is known, where a row of
ours appears as soon as its fault has ended. The code that it would save is twelve lines.
"""

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
