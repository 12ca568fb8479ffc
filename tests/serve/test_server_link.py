"""Whatever is sent twice because a server came back, rank0 does once, and says again."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scope_contracts.errors import LinkError
from scope_contracts.retraction import Retraction
from scope_runners.serve.messages import (
    Applied,
    ChunkHeader,
    Command,
    CommandKind,
    Credit,
    Hello,
    Message,
    Outcome,
    RankReady,
    Taken,
    Welcome,
)
from scope_runners.serve.server_link import ServerLink
from scope_runners.serve.wire import Connection, socket_path

READY = RankReady(
    attempt=0,
    fps=16,
    height=4,
    width=4,
    plan="single",
    tp=1,
    world_size=1,
    max_in_flight=1,
    chunk_frames=2,
    cache_bytes=0,
    next_chunk=0,
    resumed=True,
    retractions=(
        Retraction(first_chunk=3, last_chunk=5, first_epoch=0, last_epoch=0, reason="rank 1"),
    ),
    applied=(Applied(command_id="before", chunk_index=5, cache_epoch=2),),
)
BOUND_S = 60.0


@dataclass(frozen=True, slots=True)
class Steered:
    """Answers a command at once, as applied at a chunk."""

    chunk_index: int

    def when_answered(self, call: Any) -> None:
        call()

    def wait(self, timeout_s: float) -> Any:
        return SimpleNamespace(chunk_index=self.chunk_index, cache_epoch=0, superseded=False)


@dataclass(slots=True)
class Rank0:
    link: Any
    listener: socket.socket
    steered: list[str]
    connections: list[Connection]

    def server(self, *, num_taken: int = 0, last_taken: int = -1) -> Connection:
        """A server to which rank0 has connected, and said what it is."""
        end, _ = self.listener.accept()
        end.settimeout(BOUND_S)
        connection = Connection(end)
        self.connections.append(connection)
        assert isinstance(connection.receive()[0], Hello)
        ready, _ = connection.receive()
        assert isinstance(ready, RankReady)
        assert ready.retractions == READY.retractions, "a server that comes back knows none"
        connection.send(Welcome(num_taken=num_taken, last_taken=last_taken, orphan_s=BOUND_S))
        return connection


@contextmanager
def opened(
    folder: Path,
    *,
    rewind: Callable[[Command], None] = lambda command: None,
    refused: str = "",
) -> Iterator[tuple[Rank0, Connection]]:
    """Rank0 and the first server it found; the command `refused` is one that it cannot do."""
    path = socket_path(folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(4)
    listener.settimeout(BOUND_S)
    steered: list[str] = []

    def steer(command: Command) -> Any:
        steered.append(command.command_id)
        return Steered(chunk_index=7)

    link = ServerLink(path, "9a", steer=steer, rewind=rewind)
    if refused:
        link.refuse(refused, "no latents")
    rank0 = Rank0(link, listener, steered, [])
    opener = threading.Thread(target=link.open, args=(READY,), kwargs={"timeout_s": BOUND_S})
    opener.start()
    try:
        server = rank0.server()
        opener.join(BOUND_S)
        yield rank0, server
    finally:
        link.close(timeout_s=0.0)
        for connection in rank0.connections:
            connection.close()
        listener.close()
        path.unlink(missing_ok=True)


def next_of(connection: Connection, kind: type[Message]) -> Any:
    while not isinstance(message := connection.receive()[0], kind):
        continue
    return message


def chunk(index: int) -> Any:
    return SimpleNamespace(
        chunk_index=index,
        cache_epoch=0,
        prompt="a",
        frames=np.zeros((2, 4, 4, 3), dtype=np.uint8),
        generator_calls=5,
        recomputed=False,
        kv_cache_attention_bias=1.0,
        latents_sha256="",
        stage_ms={"plan": 0.5},
    )


def cut(name: str) -> Command:
    return Command(command_id=name, kind=CommandKind.HARD_CUT)


def test_a_command_that_an_earlier_process_applied_is_answered_and_not_applied_again(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as (rank0, server):
        server.send(cut("before"))
        server.send(cut("new"))
        told = {}
        while "new" not in told:
            outcome = next_of(server, Outcome)
            told[outcome.command_id] = outcome.chunk_index
        assert told == {"before": 5, "new": 7}
        assert rank0.steered == ["new"]


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_command_that_is_sent_twice_is_applied_once(tmp_path: Path, comes_back: bool) -> None:
    with opened(tmp_path) as (rank0, server):
        server.send(cut("mine"))
        while next_of(server, Outcome).command_id != "mine":
            continue
        if comes_back:
            server.close()
            server = rank0.server()
        server.send(cut("mine"))
        while next_of(server, Outcome).command_id != "mine":
            continue
        assert rank0.steered == ["mine"]


@pytest.mark.parametrize("is_acknowledged", [False, True])
def test_a_server_that_comes_back_is_sent_what_it_lacks_and_nothing_twice(
    tmp_path: Path, is_acknowledged: bool
) -> None:
    with opened(tmp_path) as (rank0, server):
        rank0.link.give(chunk(0), cache_fill=0.0)
        rank0.link.give(chunk(1), cache_fill=0.0)
        assert [next_of(server, ChunkHeader).chunk_index for _ in range(2)] == [0, 1]
        if is_acknowledged:
            server.send(Taken(num_taken=1))
        server.close()
        server = rank0.server(num_taken=1, last_taken=0)
        rank0.link.give(chunk(2), cache_fill=0.0)
        assert [next_of(server, ChunkHeader).chunk_index for _ in range(2)] == [1, 2]
        assert rank0.link.num_taken == 1


def test_a_rewind_that_could_not_be_done_is_answered_and_not_tried_again(tmp_path: Path) -> None:
    asked: list[Command] = []
    with opened(tmp_path, rewind=asked.append, refused="back") as (rank0, server):
        server.send(Command(command_id="back", kind=CommandKind.REWIND, chunk_index=3))
        while (outcome := next_of(server, Outcome)).command_id != "back":
            continue
        assert outcome.error == "no latents"
        assert asked == []
        server.send(Credit(end=9))
        assert rank0.link.wait(8)


def test_a_rewind_that_cannot_be_noted_is_answered_and_the_stream_goes_on(tmp_path: Path) -> None:
    def fails(command: Command) -> None:
        raise OSError(28, "No space left on device")

    with opened(tmp_path, rewind=fails) as (rank0, server):
        server.send(Command(command_id="back", kind=CommandKind.REWIND, chunk_index=3))
        while (outcome := next_of(server, Outcome)).command_id != "back":
            continue
        assert "No space left" in outcome.error
        server.send(Credit(end=9))
        assert rank0.link.wait(8)


def test_a_link_that_cannot_go_on_ends_the_stream_by_an_error(tmp_path: Path) -> None:
    def fails(command: Command) -> None:
        raise ValueError("nobody has foreseen it")

    with opened(tmp_path, rewind=fails) as (rank0, server):
        server.send(Command(command_id="back", kind=CommandKind.REWIND, chunk_index=3))
        waiting = threading.Thread(target=rank0.link.wait, args=(8,), daemon=True)
        waiting.start()
        waiting.join(BOUND_S)
        assert not waiting.is_alive(), "it waits for a thread that has ended"
        with pytest.raises(LinkError, match="nobody has foreseen it"):
            rank0.link.check()
