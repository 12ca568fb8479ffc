"""A `scope-rt serve` of the test's own, killed and started again on the same folder and port."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

STARTS_WITHIN_S = 60.0
ENDS_WITHIN_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True, kw_only=True)
class Served:
    """One server; `start` may be called again after `kill`."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when a session is live; fails with the server's own words where none is."""
        command = [sys.executable, "-m", "scope_runners.main", "serve", "--port", str(self.port)]
        command += ["--folder", str(self.folder), "--prompt", "a red circle, slow, on black"]
        command += ["--plan", "pp1", "--max-sessions", "2", "--seed", "7"]
        log = (self.folder / "server.log").open("ab")
        with log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not self.live():
            ended = self.process.poll() is not None
            said = (self.folder / "server.log").read_text()[-2000:]
            assert not ended, said
            assert time.monotonic() < deadline, said
            time.sleep(0.2)

    def live(self) -> bool:
        try:
            return any(session["state"] == "live" for session in self.sessions())
        except URLError:
            return False

    def sessions(self) -> list[dict[str, Any]]:
        with urlopen(f"{self.address}/v1/sessions", timeout=5) as answer:
            listed: list[dict[str, Any]] = json.load(answer)
        return listed

    def rank_pid(self, rank: int) -> int:
        """The process of a rank of the first session."""
        ranks = self.sessions()[0]["ranks"]
        return next(int(entry["pid"]) for entry in ranks if entry["rank"] == rank)

    def kill(self) -> None:
        """SIGKILL, to the server alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(ENDS_WITHIN_S)

    def end(self) -> None:
        """SIGTERM, as an operator ends it."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
