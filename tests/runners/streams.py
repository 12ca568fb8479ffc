"""Short streams from the command line, and how they are cut short; not a test itself."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import pytest

from scope_contracts.errors import PeerLostError
from scope_rt.control.chunk import Chunk
from scope_rt.session import StreamSession
from scope_runners import show
from scope_runners.break_it.faults import Fault, FaultPlan, encode
from scope_runners.break_it.instruments import FAULTS
from scope_runners.main import main
from tests.tiny_folder import tiny_folder

SHORT = [
    "stream",
    "--model",
    str(tiny_folder()),
    "--prompt",
    "a red circle",
    "--seconds",
    "3",
    "--seed",
    "7",
]


def num_frames(path: Path) -> int:
    with av.open(str(path)) as video:
        return sum(1 for _ in video.decode(video=0))


def signal_after_two_chunks(
    monkeypatch: pytest.MonkeyPatch, signum: signal.Signals = signal.SIGINT, *, times: int = 1
) -> None:
    """A person stops the streams of this test then."""

    def stop() -> None:
        for _ in range(times):
            signal.raise_signal(signum)

    after_two_chunks(monkeypatch, stop)


def after_two_chunks(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """What a person does to the streams of this test then."""

    @contextmanager
    def bar(num_frames: int, *, enabled: bool) -> Iterator[Any]:
        seen: list[Chunk] = []

        def show(chunk: Chunk) -> None:
            seen.append(chunk)
            if len(seen) == 2:
                act()

        yield show

    monkeypatch.setattr(show, "progress_bar", bar)


def lose_the_link_after(num_chunks: int, out: Path, *arguments: str, stopped: bool = False) -> None:
    """Leave at `out` a stream that failed, after a person had `stopped` it or not."""
    whole = StreamSession.stream

    def lose_the_link(session: StreamSession, *args: Any, **options: Any) -> Iterator[Chunk]:
        chunks = whole(session, *args, **options)
        for _ in range(num_chunks):
            yield next(chunks)
        if stopped:
            signal.raise_signal(signal.SIGINT)
        raise PeerLostError("receive from rank 1: a peer is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamSession, "stream", lose_the_link)
        assert main([*SHORT, "--out", str(out), *arguments]) == 1


PP1 = ["--plan", "pp1", "--oversubscribe"]


def set_faults(monkeypatch: pytest.MonkeyPatch, *faults: Fault) -> None:
    """Faults of the ranks that `break_it.stream` starts in this test."""
    monkeypatch.setenv(FAULTS, encode(FaultPlan(faults=faults)))


def as_rank_0_of_torchrun(monkeypatch: pytest.MonkeyPatch, *, max_restarts: int = 0) -> None:
    """As where torchrun starts the only rank of this test."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(max_restarts))


def contents(folder: Path) -> dict[Path, bytes]:
    """All files, those of the snapshot too."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
