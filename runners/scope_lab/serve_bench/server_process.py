"""A server as a user starts it, its session, and the memory of its processes."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scope_contracts.errors import ScopeError

_START_S = 120.0
_ANSWER_S = 30.0


class ServerProcess:
    """`scope-rt serve` on a free port, with its files in `folder`."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        """Blocks until its session is live.

        Raises:
            ScopeError: it is not, in time.
        """
        self._output = folder / "server.log"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "scope_runners.main", "serve"),
                    *("--folder", str(folder / "serve"), "--port", "0", *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.url = self._until_it_says_where()
        self.session_id = self._until_it_is_live()

    @property
    def base(self) -> str:
        """The session's part of the URL."""
        return f"/v1/sessions/{self.session_id}"

    def session(self) -> dict[str, Any]:
        """As the server tells it."""
        (session,) = self._get("/v1/sessions")
        assert isinstance(session, dict)
        return session

    def command(self, **fields: Any) -> dict[str, Any]:
        """A command's receipt."""
        request = urllib.request.Request(
            f"{self.url}{self.base}/commands?wait_s=30",
            data=json.dumps(fields).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            receipt: dict[str, Any] = json.loads(answer.read())
        if receipt["state"] not in ("applied", "superseded"):
            raise ScopeError(f"{fields['kind']}: {receipt['state']} ({receipt['error']})")
        return receipt

    def pids(self) -> dict[str, int]:
        """Of the server, and of each rank."""
        ranks = {f"rank{each['rank']}": each["pid"] for each in self.session()["ranks"]}
        return {"server": self._process.pid} | ranks

    def pin(self, cores: Sequence[int]) -> None:
        """Rank0 to the first core, the server to the second, where there are four or more."""
        if len(cores) < 4:
            return
        pids = self.pids()
        _pin(pids["server"], {cores[1]})
        for name, pid in pids.items():
            if name != "server":
                _pin(pid, {cores[0]})

    def close(self) -> None:
        """End it in order."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(150)

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=_ANSWER_S) as answer:
            return json.loads(answer.read())

    def _until_it_says_where(self) -> str:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            for line in self._output.read_text().splitlines():
                if line.startswith("scope-rt: http"):
                    return line.removeprefix("scope-rt: ").rstrip("/")
            time.sleep(0.1)
        raise ScopeError(f"the server did not start; see {self._output}")

    def _until_it_is_live(self) -> str:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            (session,) = self._get("/v1/sessions")
            if session["state"] == "live" and session["media_time_s"] > 1:
                return str(session["id"])
            time.sleep(0.2)
        raise ScopeError(f"its session is not live; see {self._output}")


def cpu_seconds(pid: int) -> float:
    """That a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ScopeError(f"process {pid} has no memory")


def _pin(pid: int, cores: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)
