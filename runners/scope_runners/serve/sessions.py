"""Every session of a server: as many as it may have, each until it is deleted or its lease is over,
and all of them again after the server was killed."""

import contextlib
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from scope_contracts.errors import ScopeError, UserInputError
from scope_rt.config import StreamConfig
from scope_rt.file_lock import open_locked
from scope_runners.serve.events import Event
from scope_runners.serve.messages import CommandKind
from scope_runners.serve.rank_listener import RankListener
from scope_runners.serve.session import LiveSession
from scope_runners.serve.session_files import SessionFiles, StreamJob
from scope_runners.serve.session_record import SessionRecord, read_record, write_record
from scope_runners.serve.session_states import SessionState
from scope_runners.serve.settings import ServeSettings, check_keeps_latents
from scope_runners.serve.wire import socket_path

_LOOK_S = 1.0
_OVER = (SessionState.STOPPED, SessionState.FAILED)
MOST_ENDED = 64
"""Sessions that have ended and were not deleted; beyond, no other is begun."""
_OWN_SETTINGS = ("log", "snapshot", "record_latents", "resume", "image")
"""Of `StreamConfig`: the server decides them."""
_LOG = logging.getLogger(__name__)


class TooManySessionsError(ScopeError):
    """The server holds as many sessions as it may."""


class NotMadeError(ScopeError):
    """The server's disk, or its machine, has no place for a session."""


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
        self._sessions: Mapping[str, LiveSession] = {}
        """Replaced and never changed: whoever reads it waits for nobody."""
        self._being_made: set[str] = set()
        self._has_ended = threading.Event()
        self._socket_path = socket_path(settings.folder)
        self._listener = RankListener(self._socket_path, lambda name: self._sessions.get(name))

    def open(self) -> None:
        """Continue what an earlier server left, and take the ranks that outlived it; a session that
        cannot be continued is said, and left."""
        for folder in sorted(self.settings.sessions.iterdir()):
            files = SessionFiles(folder)
            try:
                record = read_record(files)
                if record is not None:
                    self._open(record, files)
            except (ScopeError, OSError, LookupError, TypeError, ValueError) as error:
                # The last three: it was written by another version.
                _LOG.error("the session in %s is not continued: %s", folder, error)
        self._listener.start()
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
            NotMadeError: the disk, or the machine, has no place for it.
        """
        for name in _OWN_SETTINGS:
            if name in settings:
                raise UserInputError(f"{name}: the server decides it; leave it out")
        if not prompt.strip():
            raise UserInputError("prompt: is empty; describe what is to be seen")
        StreamConfig.of(**settings)
        with self._making() as files:
            given = dict(settings)
            if image:
                files.image.write_bytes(image)
                given["image"] = str(files.image.absolute())
            return self._open(self._noted(files, prompt, given, lease_s), files)

    def fork(self, parent: LiveSession, chunk_index: int, prompt: str | None) -> LiveSession:
        """Start a session that continues a copy of another one's stream before a chunk.

        Raises:
            UserInputError: that chunk was not shown.
            TooManySessionsError: there are as many as may be.
            NotMadeError: the disk, or the machine, has no place for it.
        """
        last = parent.taken.last[0]
        check_keeps_latents(self.settings)
        if not 0 <= chunk_index <= last:
            raise UserInputError(f"chunk {chunk_index} was not shown; give 0 to {last}")
        with self._making() as files:
            given = dict(parent.record.settings)
            shutil.copyfile(parent.files.log, files.log)
            if parent.files.image.exists():
                shutil.copyfile(parent.files.image, files.image)
                given["image"] = str(files.image.absolute())
            files.ask_for_rewind(chunk_index)
            record = self._noted(files, prompt or parent.prompt, given, None, parent.record.id)
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
        return tuple(self._sessions.values())

    def delete(self, session_id: str) -> bool:
        """End a session for good; blocks for its end. Its recordings stay."""
        session = self._taken_out(session_id)
        if session is not None:
            self._end_for_good(session)
        return session is not None

    def _end_for_good(self, session: LiveSession) -> None:
        session.give_up("the session was deleted")
        session.end("the session was deleted")
        session.files.forget()
        session.events.close()

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
        self._listener.close()
        os.close(self._folder_lock)

    def why_no_more(self) -> str:
        """Why no session can be begun now; "" where one can."""
        try:
            with self._lock:
                self._check_room()
        except TooManySessionsError as error:
            return str(error)
        return ""

    def _check_room(self) -> None:
        ended = {k for k, each in self._sessions.items() if each.state in _OVER}
        num_live = len((self._sessions.keys() - ended) | self._being_made)
        if num_live >= self.settings.max_sessions:
            raise TooManySessionsError(
                f"{num_live} of {self.settings.max_sessions} sessions are there; delete one, or "
                "start the server with a larger --max-sessions"
            )
        if len(ended) >= MOST_ENDED:
            raise TooManySessionsError(
                f"{len(ended)} sessions that have ended are kept; delete those that you do not need"
            )

    @contextlib.contextmanager
    def _making(self) -> Iterator[SessionFiles]:
        """Room for one session more, and its folder; of one that cannot be made nothing is left."""
        files = SessionFiles(self.settings.sessions / uuid.uuid4().hex[:12])
        name = files.folder.name
        with self._lock:
            self._check_room()
            self._being_made.add(name)
        try:
            files.folder.mkdir(mode=0o700)
            yield files
        except BaseException as error:
            session = self._taken_out(name)
            if session is not None:
                session.end("it could not be made")
            shutil.rmtree(files.folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise NotMadeError(
                    f"the session cannot be made ({error.strerror or error}); free disk space, or "
                    "what else the server's machine lacks, and ask again"
                ) from error
            raise
        finally:
            with self._lock:
                self._being_made.discard(name)

    def _noted(
        self,
        files: SessionFiles,
        prompt: str,
        settings: Mapping[str, Any],
        lease_s: float | None,
        forked_from: str = "",
    ) -> SessionRecord:
        """Written last of what a session is made of: a server that is killed before has none."""
        record = SessionRecord(
            id=files.folder.name,
            prompt=prompt,
            settings=settings,
            lease_s=self.settings.lease_s if lease_s is None else lease_s,
            created_at=time.time(),
            forked_from=forked_from,
        )
        write_record(files, record)
        return record

    def _open(self, record: SessionRecord, files: SessionFiles) -> LiveSession:
        session = LiveSession(record, files, self.settings, observe=self._observe)
        job = StreamJob(
            session_id=record.id,
            socket=self._socket_path,
            prompt=record.prompt,
            settings=record.settings,
            threads=self.settings.threads,
            keeps_latents=self.settings.keeps_latents,
        )
        with self._lock:  # who deletes it waits until it has begun
            self._sessions = {**self._sessions, record.id: session}
            session.start(job)
        return session

    def _taken_out(self, session_id: str) -> LiveSession | None:
        with self._lock:
            session = self._sessions.get(session_id)
            self._sessions = {k: v for k, v in self._sessions.items() if k != session_id}
        return session

    def _taken_out_if_over(self, session: LiveSession) -> bool:
        """Who asks for it in that moment, by `get`, keeps it."""
        with self._lock:
            was_over = session.is_over
            if not was_over or self._taken_out(session.record.id) is None:
                return False
            is_over = session.is_over
            if not is_over:
                self._sessions = {**self._sessions, session.record.id: session}
        return is_over

    def _look(self) -> None:
        """End sessions whose lease is over, and tell everyone how theirs runs."""
        while not self._has_ended.wait(_LOOK_S):
            for session in self.all():
                try:
                    session.look()
                except Exception:  # noqa: BLE001 - the others are looked after too
                    _LOG.exception("session %s cannot be looked after", session.record.id)
                if self._taken_out_if_over(session):
                    _LOG.warning("session %s: its lease is over", session.record.id)
                    threading.Thread(target=self._end_for_good, args=(session,)).start()
