"""The session that the command itself starts: it has no lease, and where its ranks refuse what was
typed, it is deleted and the command ends."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from scope_runners.serve.session import LiveSession
from scope_runners.serve.session_states import SessionState
from scope_runners.serve.sessions import Sessions

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.2


class FirstSession:
    """Of one server."""

    def __init__(self, sessions: Sessions, *, end: Callable[[], None]) -> None:
        """`end` ends the server soon, and may be called by any thread."""
        self._sessions, self._end = sessions, end
        self.refusal = ""
        """Why it cannot be streamed; "" where it can."""

    def open(self, prompt: str, settings: Mapping[str, Any]) -> None:
        """Start it, unless the folder has sessions already.

        Raises:
            UserInputError: a setting cannot be used.
        """
        if not self._sessions.all():
            session = self._sessions.create(prompt, settings, lease_s=0.0)
            threading.Thread(target=self._watch, args=(session,), daemon=True).start()
        for each in own_sessions(self._sessions):
            if (each.record.prompt, dict(each.record.settings)) != (prompt, dict(settings)):
                _LOG.warning(
                    "session %s of this folder continues with its own prompt and settings; for a "
                    "new one give another --folder",
                    each.record.id,
                )

    def _watch(self, session: LiveSession) -> None:
        """Until it has given a chunk, or never will."""
        while session.taken.last[0] < 0:
            if session.has_refused:
                self.refusal = session.view()["detail"]
                self._sessions.delete(session.record.id)
                self._end()
            if session.state in (SessionState.STOPPED, SessionState.FAILED):
                return
            time.sleep(_LOOK_S)


def own_sessions(sessions: Sessions) -> list[LiveSession]:
    """Those that the command started, now or when the folder was served before."""
    return [each for each in sessions.all() if not each.record.lease_s]
