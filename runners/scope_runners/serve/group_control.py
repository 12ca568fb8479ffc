"""The launcher of a session is started once, found again by its lock, and ended within a bound."""

import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from scope_rt.environment_names import SECRET, SECRET_FILE, SERVE_TOKEN
from scope_rt.file_lock import open_locked
from scope_runners.serve.session_files import SessionFiles
from scope_runners.wording import printable

END_S = 90.0
"""For the chunk that is being made, and the ranks' orderly end."""
_KILL_S = 10.0
_MOST_OUTPUT_BYTES = 2**16
_SPEAKER = "scope-rt: "
_LOOK_S = 0.05
_OWN = (SECRET, SECRET_FILE, SERVE_TOKEN)
"""No process of a stream is given them."""
_LOG = logging.getLogger(__name__)


class GroupControl:
    """The launcher's process, which may be older than this server."""

    def __init__(self, files: SessionFiles) -> None:
        self._files = files
        self._process: subprocess.Popen[bytes] | None = None
        self._output_begins_at: int | None = None
        """In the file; None where an earlier server started it."""
        self.pid: int | None = None
        """As its own hello says."""

    @property
    def runs(self) -> bool:
        """Whether it holds its lock, or is about to."""
        if self._process is not None and self._process.poll() is None:
            return True
        # One that an earlier server started may have begun just before ours, which then ended.
        try:
            os.close(open_locked(self._files.launcher_lock))
        except BlockingIOError:
            return True
        return False

    def start(self) -> None:
        """Start it in a session of its own: a terminal's Ctrl-C reaches the server alone."""
        environ = {k: v for k, v in os.environ.items() if k not in _OWN}
        with self._files.group_output.open("ab") as output:
            self._output_begins_at = output.tell()
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "scope_runners.serve.group_process",
                    str(self._files.folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def last_sentence(self) -> str:
        """The sentence with which it, or a rank of its, ended last; "" where none is known."""
        if self._output_begins_at is None:
            return ""
        with self._files.group_output.open("rb") as output:
            size = output.seek(0, os.SEEK_END)
            output.seek(max(self._output_begins_at, size - _MOST_OUTPUT_BYTES))
            lines = output.read().decode(errors="replace").splitlines()
        said = [line.removeprefix(_SPEAKER) for line in lines if line.startswith(_SPEAKER)]
        return printable(said[-1]) if said else ""

    def wait(self) -> None:
        """Return when it has ended; blocks `END_S` at most, then it is signalled, and killed."""
        for signum, patience_s in ((None, END_S), (signal.SIGTERM, _KILL_S), (signal.SIGKILL, 2.0)):
            if signum is not None and self.pid is not None:
                _LOG.warning("the launcher (process %d) has not ended; %s", self.pid, signum.name)
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signum)
            deadline_s = time.monotonic() + patience_s
            while time.monotonic() < deadline_s:
                if not self.runs:
                    return
                time.sleep(_LOOK_S)
