"""Every session of a server: as many as it may have, each until it is deleted or its lease is over,
and all of them again after the server was killed."""

import contextlib
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scope_contracts.errors import LinkError, ScopeError, UserInputError
from scope_rt.config import StreamConfig
from scope_rt.file_lock import open_locked
from scope_runners.serve.events import Event
from scope_runners.serve.journal import JournalError
from scope_runners.serve.messages import CommandKind, End, Hello, Role
from scope_runners.serve.session import LiveSession
from scope_runners.serve.session_files import SessionFiles, StreamJob
from scope_runners.serve.session_record import SessionRecord, read_record, write_record
from scope_runners.serve.session_states import SessionState
from scope_runners.serve.settings import ServeSettings, check_keeps_latents
from scope_runners.serve.wire import Connection, socket_path

_LOOK_S = 1.0
_RETRY_S = 0.2
_OWN_SETTINGS = ("log", "snapshot", "record_latents", "resume", "image")
"""Of `StreamConfig`: the server decides them."""
_LOG = logging.getLogger(__name__)


class TooManySessionsError(ScopeError):
    """The server holds as many sessions as it may."""


class Sessions:
    """Any thread may use it. Made by the one server of its folder."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        observe: Callable[[str, Event], None] = lambda session_id, event: None,
    ) -> None:
        """Takes the folder. `observe` is called with every event of every session, and its id.

        Raises:
            UserInputError: another server serves it, or it cannot be written.
        """
        self.settings, self._observe = settings, observe
        try:
            settings.sessions.mkdir(parents=True, exist_ok=True)
            self._folder_lock = open_locked(settings.folder / "server.lock")
        except BlockingIOError:
            raise UserInputError(
                f"another server serves {settings.folder}; give another --folder, or end that one"
            ) from None
        except OSError as error:
            raise UserInputError(
                f"cannot serve from {settings.folder} ({error.strerror}); give another --folder"
            ) from error
        self._lock = threading.RLock()
        self._sessions: dict[str, LiveSession] = {}
        self._has_ended = threading.Event()
        self._socket_path = socket_path(settings.folder)
        self._socket_path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self._socket_path))
        os.chmod(self._socket_path, 0o600)
        self._listener.listen(64)

    def open(self) -> None:
        """Continue what an earlier server left, and take the ranks that outlived it; a session that
        cannot be continued is said, and left."""
        for folder in sorted(self.settings.sessions.iterdir()):
            files = SessionFiles(folder)
            try:
                record = read_record(files)
                if record is not None:
                    self._open(record, files)
            except (ScopeError, OSError) as error:
                _LOG.error("the session in %s is not continued: %s", folder, error)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        threading.Thread(target=self._look, name="leases", daemon=True).start()

    def create(
        self,
        prompt: str,
        settings: Mapping[str, Any],
        *,
        lease_s: float | None = None,
        image: bytes = b"",
    ) -> LiveSession:
        """Start a session; `image` are the bytes of a picture that it begins with.

        Raises:
            UserInputError: a setting cannot be used.
            TooManySessionsError: there are as many as may be.
        """
        for name in _OWN_SETTINGS:
            if name in settings:
                raise UserInputError(f"{name}: the server decides it; leave it out")
        if not prompt.strip():
            raise UserInputError("prompt: is empty; describe what is to be seen")
        StreamConfig.of(**settings)
        with self._lock:
            self._check_room()
            return self._open(*self._place(prompt, settings, lease_s, "", image))

    def fork(self, parent: LiveSession, chunk_index: int, prompt: str | None) -> LiveSession:
        """Start a session that continues a copy of another one's stream before a chunk.

        Raises:
            UserInputError: that chunk was not shown.
            TooManySessionsError: there are as many as may be.
        """
        last = parent.taken.last[0]
        check_keeps_latents(self.settings)
        if not 0 <= chunk_index <= last:
            raise UserInputError(f"chunk {chunk_index} was not shown; give 0 to {last}")
        with self._lock:
            self._check_room()
            record, files = self._place(
                prompt or parent.prompt, parent.record.settings, None, parent.record.id
            )
            shutil.copyfile(parent.files.log, files.log)
            files.ask_for_rewind(chunk_index)
            session = self._open(record, files)
        if prompt is not None:
            session.post(CommandKind.PROMPT, {"text": prompt})
        return session

    def get(self, session_id: str) -> LiveSession | None:
        """None where there is no such session; to ask for it renews its lease."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.renew()
        return session

    def all(self) -> tuple[LiveSession, ...]:
        """In the order in which they were made."""
        with self._lock:
            return tuple(self._sessions.values())

    def delete(self, session_id: str) -> bool:
        """End a session for good; blocks for its end. Its recordings stay."""
        with self._lock:
            session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        session.give_up("the session was deleted")
        session.end("the session was deleted")
        session.files.forget()
        return True

    def close(self) -> None:
        """End all sessions in order, to be continued by the next server of this folder."""
        self._has_ended.set()
        enders = [
            threading.Thread(target=each.end, args=("the server ends",)) for each in self.all()
        ]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._socket_path.unlink(missing_ok=True)
        os.close(self._folder_lock)

    def _check_room(self) -> None:
        num_live = sum(
            each.state not in (SessionState.STOPPED, SessionState.FAILED) for each in self.all()
        )
        if num_live >= self.settings.max_sessions:
            raise TooManySessionsError(
                f"{num_live} of {self.settings.max_sessions} sessions are there; delete one, or "
                "start the server with a larger --max-sessions"
            )

    def _place(
        self,
        prompt: str,
        settings: Mapping[str, Any],
        lease_s: float | None,
        forked_from: str,
        image: bytes = b"",
    ) -> tuple[SessionRecord, SessionFiles]:
        name = uuid.uuid4().hex[:12]
        files = SessionFiles(self.settings.sessions / name)
        files.folder.mkdir(mode=0o700)
        if image:
            files.image.write_bytes(image)
        record = SessionRecord(
            id=name,
            prompt=prompt,
            settings={**settings, **({"image": str(files.image.absolute())} if image else {})},
            lease_s=self.settings.lease_s if lease_s is None else lease_s,
            created_at=time.time(),
            forked_from=forked_from,
        )
        write_record(files, record)
        return record, files

    def _open(self, record: SessionRecord, files: SessionFiles) -> LiveSession:
        session = LiveSession(record, files, self.settings, observe=self._observe)
        with self._lock:
            self._sessions[record.id] = session
        session.start(
            StreamJob(
                session_id=record.id,
                socket=self._socket_path,
                prompt=record.prompt,
                settings=record.settings,
                threads=self.settings.threads,
                keeps_latents=self.settings.keeps_latents,
            )
        )
        return session

    def _accept(self) -> None:
        while not self._has_ended.is_set():
            try:
                end, _ = self._listener.accept()
            except OSError as error:
                if not self._has_ended.wait(_RETRY_S):
                    _LOG.error("ranks cannot connect for now (%s)", error.strerror)
                continue
            threading.Thread(target=self._serve, args=(Connection(end),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            hello, _ = connection.receive()
            if not isinstance(hello, Hello):
                raise LinkError(f"a connection begins with a hello, not {type(hello).__name__}")
            session = self._sessions.get(hello.session_id)
            if session is None:
                connection.send(End())  # nobody will ever take what it streams
                raise LinkError(f"there is no session {hello.session_id}")
            with _named(session):
                if hello.role is Role.LAUNCHER:
                    session.serve_launcher(connection, hello.pid)
                else:
                    session.serve_rank0(connection)
        except LinkError as error:
            _LOG.info("%s", error)
        finally:
            connection.close()

    def _look(self) -> None:
        """End sessions whose lease is over, and tell everyone how theirs runs."""
        while not self._has_ended.wait(_LOOK_S):
            for session in self.all():
                try:
                    session.look()
                except Exception:  # noqa: BLE001 - the others are looked after too
                    _LOG.exception("session %s cannot be looked after", session.record.id)
                if session.is_over:
                    _LOG.warning("session %s: its lease is over", session.record.id)
                    threading.Thread(target=self.delete, args=(session.record.id,)).start()


@contextlib.contextmanager
def _named(session: LiveSession) -> Iterator[None]:
    """What a thread of a session cannot go on by ends that session, and says so to its clients."""
    try:
        yield
    except LinkError:
        raise
    except JournalError as error:
        session.give_up_by(error)
    except Exception as error:  # noqa: BLE001 - a stream that stands still in silence
        _LOG.exception("session %s cannot be followed", session.record.id)
        session.give_up_by(ScopeError(f"the server failed ({error!r}); see its log"))
