"""One session of no server, whose rank0 is the test itself; not a test itself."""

import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import LinkError
from scope_runners.serve.group_control import GroupControl
from scope_runners.serve.messages import ChunkHeader, RankReady, Welcome
from scope_runners.serve.session import LiveSession
from scope_runners.serve.session_files import SessionFiles
from scope_runners.serve.session_record import SessionRecord
from scope_runners.serve.settings import ServeSettings
from scope_runners.serve.wire import Connection

BOUND_S = 60.0
READY = RankReady(
    attempt=0,
    fps=16,
    height=16,
    width=16,
    plan="single",
    tp=1,
    world_size=1,
    max_in_flight=1,
    chunk_frames=2,
    cache_bytes=0,
    next_chunk=0,
    resumed=False,
)


def session_in(folder: Path, **changes: Any) -> LiveSession:
    """As a server makes it; nothing runs."""
    record = SessionRecord(id="9a", prompt="a", settings={}, lease_s=0.0, created_at=0.0)
    folder.mkdir(exist_ok=True)
    settings = ServeSettings(folder=folder, **changes)
    return LiveSession(record, SessionFiles(folder), settings)


@contextmanager
def without_processes() -> Iterator[None]:
    """Sessions start no launcher, and wait for none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupControl, "start", lambda self: None)
        patch.setattr(GroupControl, "runs", True)
        patch.setattr(GroupControl, "wait", lambda self: None)
        yield


@contextmanager
def rank0_of(session: LiveSession, **changes: Any) -> Iterator[Connection]:
    """Rank0's end, which the session has welcomed."""
    with serving(session) as mine:
        mine.send(replace(READY, **changes))
        while not isinstance(mine.receive()[0], Welcome):
            continue
        yield mine


@contextmanager
def serving(session: LiveSession) -> Iterator[Connection]:
    """An end of which the session reads the other, as rank0's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(BOUND_S)
    mine, its = Connection(ours), Connection(theirs)

    def serve() -> None:
        with suppress(LinkError):
            session.serve_rank0(its)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield mine
    finally:
        mine.close()
        thread.join(BOUND_S)
        its.close()
        assert not thread.is_alive()


def header(index: int, body: bytes, *, epoch: int = 0) -> ChunkHeader:
    """Of a chunk of `READY`'s sizes."""
    return ChunkHeader(
        chunk_index=index,
        cache_epoch=epoch,
        prompt="a",
        num_frames=2,
        height=16,
        width=16,
        crc32=zlib.crc32(body),
        generator_calls=1,
        recomputed=False,
        bias=1.0,
        cache_fill=0.0,
        latents_sha256="",
        stage_ms=(),
    )


BODY = bytes(2 * 16 * 16 * 3)
