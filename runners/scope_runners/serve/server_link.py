"""Rank0's end of its session: chunks leave in order, each until the server has it; commands are
posted once and answered once; no chunk is begun before the server wants it.

The server may be killed and come back: chunks that it had not taken, and answers that it may not
have read, are sent again. A server that stays away for `orphan_s` ends the stream in order.
"""

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from scope_contracts.errors import LinkError, ScopeError
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Receipt
from scope_rt.control.video_input import InputPictures
from scope_runners.serve.messages import (
    ChunkHeader,
    Command,
    CommandKind,
    Credit,
    End,
    Message,
    Pictures,
    RankReady,
    Taken,
    Welcome,
)
from scope_runners.serve.obeyed_commands import ObeyedCommands
from scope_runners.serve.reconnect import Reconnecting
from scope_runners.serve.wire import Connection

_QUEUED = 2
_LOG = logging.getLogger(__name__)


class ServerLink:
    """Used by rank0's computing thread; it is the `Pace` of the stream too."""

    def __init__(
        self,
        path: Path,
        session_id: str,
        *,
        steer: Callable[[Command], Receipt],
        rewind: Callable[[Command], None],
    ) -> None:
        """`steer` posts a command, `rewind` notes that the stream is to be rewound at its end."""
        self._rewind = rewind
        self._commands = ObeyedCommands(steer=steer, say=self.say)
        self._state = threading.Condition()
        self._ready: RankReady | None = None
        self._welcome: Welcome | None = None
        self._num_before = 0
        """Chunks of the stream before those that this process gives."""
        self._num_taken = 0
        self._credit_end = 0
        self._asked_for = 0
        """The chunk that would be begun next."""
        self._current: Connection | None = None
        """The one whose server has said what it lacks; nothing is sent to another."""
        self._notices: deque[Message] = deque()
        self._unsent: deque[tuple[ChunkHeader, bytes]] = deque()
        self._untaken: deque[tuple[ChunkHeader, bytes]] = deque()
        """Sent, and not taken as far as is known."""
        self._pictures: InputPictures | None = None
        self._failure: Exception | None = None
        self._has_ended = False
        self._is_closed = False
        self._server = Reconnecting(
            path,
            session_id,
            on_connected=self._connected,
            on_message=self._received,
            on_lost=self.end,
            on_failed=self._failed,
        )
        # Its own thread: a server that reads slowly holds up no computing.
        self._sender = threading.Thread(target=self._send_all, name="frames", daemon=True)

    def open(self, ready: RankReady, *, timeout_s: float) -> None:
        """Tell the server what this process is ready to stream, and wait for what it has taken.

        Raises:
            LinkError: no server answered in time.
        """
        self._commands.restore(ready.applied)
        with self._state:
            self._ready = ready
        self._server.start()
        with self._state:
            if not self._state.wait_for(lambda: self._welcome is not None, timeout_s):
                raise LinkError(f"the server of this session gave no answer within {timeout_s:g} s")
        self._sender.start()

    @property
    def num_taken(self) -> int:
        """Chunks of the stream that the server has for good."""
        with self._state:
            return self._num_taken

    def may_begin(self, chunk_index: int) -> bool:
        """As `Pace.may_begin`."""
        with self._state:
            self._asked_for = chunk_index
            return chunk_index < self._credit_end and not self._has_ended

    def wait(self, chunk_index: int) -> bool:
        """As `Pace.wait`."""
        with self._state:
            self._asked_for = chunk_index
            self._state.wait_for(lambda: self._has_ended or chunk_index < self._credit_end)
            return not self._has_ended

    def newest(self, num_frames: int) -> InputPictures | None:
        """As `VideoInput.newest`: what the server has sent last."""
        return self._pictures

    def give(self, chunk: Chunk, *, cache_fill: float) -> None:
        """Hand over a chunk; blocks while the server has not read those before it."""
        raw = chunk.frames.tobytes()
        num_frames, height, width = chunk.frames.shape[:3]
        header = ChunkHeader(
            chunk_index=chunk.chunk_index,
            cache_epoch=chunk.cache_epoch,
            prompt=chunk.prompt,
            num_frames=num_frames,
            height=height,
            width=width,
            crc32=zlib.crc32(raw),
            generator_calls=chunk.generator_calls,
            recomputed=chunk.recomputed,
            bias=chunk.kv_cache_attention_bias,
            cache_fill=cache_fill,
            latents_sha256=chunk.latents_sha256,
            stage_ms=tuple(chunk.stage_ms.items()),
        )
        with self._state:
            self._state.wait_for(lambda: len(self._unsent) < _QUEUED or self._has_ended)
            self._unsent.append((header, raw))
            self._state.notify_all()

    def say(self, message: Message) -> None:
        """Send it soon; a server that is gone meanwhile does not get it."""
        with self._state:
            self._notices.append(message)
            self._state.notify_all()

    def refuse(self, command_id: str, why: str) -> None:
        """What an earlier process took, and this one cannot do. Called before `open`."""
        self._commands.refuse(command_id, why)

    def check(self) -> None:
        """Raises `LinkError`: one of its threads could not go on, which has ended the stream."""
        if self._failure is not None:
            raise LinkError(f"rank0's link to its server failed ({self._failure!r})")

    def end(self) -> None:
        """End the stream before the next chunk; may be called by a signal's handler."""
        threading.Thread(target=self._end, name="end", daemon=True).start()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Wait until the server has what was given, `timeout_s` at most, and disconnect."""
        deadline_s = time.monotonic() + timeout_s
        with self._state:
            self._state.wait_for(
                lambda: (
                    not (self._unsent or self._untaken or self._notices)
                    or not self._server.is_connected
                ),
                max(0.0, deadline_s - time.monotonic()),
            )
            self._is_closed = self._has_ended = True
            self._state.notify_all()
        self._server.close()

    def _failed(self, error: Exception) -> None:
        self._failure = error
        self._end()

    def _end(self) -> None:
        with self._state:
            self._has_ended = True
            self._state.notify_all()

    def _connected(self, connection: Connection) -> None:
        """A connection begins with what this process is."""
        with self._state:
            ready = self._ready
        assert ready is not None, "opened with it"
        connection.send(ready)

    def _received(self, connection: Connection, message: Message, body: bytearray) -> None:
        match message:
            case Welcome():
                self._welcomed(connection, message)
            case Credit(end=end):
                with self._state:
                    self._credit_end = end
                    self._state.notify_all()
            case Taken(num_taken=num_taken):
                self._taken(num_taken)
            case Command():
                self._post(message)
            case Pictures():
                self._give(message, body)
            case End():
                self._end()
            case _:
                raise LinkError(f"a server does not send {type(message).__name__}")

    def _welcomed(self, connection: Connection, welcome: Welcome) -> None:
        with self._state:
            is_first = self._welcome is None
            self._welcome, self._current = welcome, connection
            self._server.patience_s = welcome.orphan_s
            if is_first:
                self._num_taken = welcome.num_taken
            else:
                # What it lacks of what was sent is sent once more, before anything later.
                lacks = [e for e in self._untaken if e[0].chunk_index > welcome.last_taken]
                self._unsent.extendleft(reversed(lacks))
                self._untaken.clear()
                self._num_taken = welcome.num_taken
            self._notices = deque([*self._commands.answered, *self._notices])
            # From here on a server that comes back is told of a process that it knows.
            assert self._ready is not None, "said before"
            self._ready = replace(self._ready, resumed=False, applied=())
            self._state.notify_all()

    def _taken(self, num_taken: int) -> None:
        with self._state:
            for _ in range(min(num_taken - self._num_taken, len(self._untaken))):
                self._untaken.popleft()
            self._num_taken = max(self._num_taken, num_taken)
            self._state.notify_all()

    def _give(self, pictures: Pictures, body: bytearray) -> None:
        """Pictures that came damaged are none: newer ones come with the next chunk."""
        given = None
        if pictures.num_frames and zlib.crc32(body) == pictures.crc32:
            shape = (pictures.num_frames, pictures.height, pictures.width, 3)
            frames = np.frombuffer(body, dtype=np.uint8).reshape(shape)
            given = InputPictures(frames=frames, noise_scale=pictures.noise_scale)
        self._pictures = given

    def _post(self, command: Command) -> None:
        """Once, however often it is sent."""
        if not self._commands.is_new(command):
            return
        if command.kind is CommandKind.REWIND:
            try:
                self._rewind(command)
            except (ScopeError, OSError) as error:
                self._commands.refuse(command.command_id, f"it cannot be noted ({error})")
            else:
                self._end()
        elif self._commands.post(command) and (
            command.hard_cut or command.kind is CommandKind.HARD_CUT
        ):
            with self._state:  # nobody wants to see what would come before it
                self._credit_end = max(self._credit_end, self._asked_for + 1)
                self._state.notify_all()

    def _send_all(self) -> None:
        try:
            self._send_until_closed()
        except Exception as error:  # noqa: BLE001 - the stream would wait for it for ever
            _LOG.exception("what the server lacks cannot be sent")
            self._failed(error)

    def _send_until_closed(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(self._has_something_to_send)
                connection = self._current
                if connection is None or not (self._notices or self._unsent):
                    return  # closed
                message: Message
                body = b""
                if self._notices:
                    message = self._notices.popleft()
                else:
                    message, body = self._unsent[0]
                    self._untaken.append(self._unsent.popleft())
                self._state.notify_all()
            try:
                connection.send(message, body)
            except LinkError as error:  # the next one says what it lacks
                _LOG.info("%s", error)
                with self._state:
                    self._current = None if self._current is connection else self._current

    def _has_something_to_send(self) -> bool:
        waits = bool(self._notices or self._unsent)
        return self._is_closed or (waits and self._current is not None)
