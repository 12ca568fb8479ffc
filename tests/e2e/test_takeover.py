"""Another user of the machine tries to take a stream over; it is refused by name and goes on."""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import warm_python
from tests.multiprocess.test_strangers import ports_of

NOBODY = 65534
STRANGER = """
import encodings.idna  # which this user could not read later
import os, sys, threading, time
from scope_contracts.errors import ScopeError
from scope_rt.config import MeshConfig
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.mesh.meeting_point import MeetingPoint
from scope_rt.mesh.process_group import join_world
from torch.distributed import TCPStore

port, user = int(sys.argv[1]), int(sys.argv[2])
os.setgid(user)
os.setuid(user)
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
print("connected as user", os.getuid(), flush=True)


def join_as_rank_1():
    # As a rank does, with this very package: it would be sent the prompt, and its answers shown.
    environment = LaunchEnvironment(
        launched=True, rank=1, world_size=2, master_addr="127.0.0.1", master_port=port,
        store_is_hosted=True,
    )
    try:
        join_world(environment, MeshConfig(start_timeout_s=3.0))
        print("TOOK RANK 1 OVER", flush=True)
    except ScopeError as error:
        print("refused:", error, flush=True)


def write_everywhere():
    # What once ended a start of the ranks, blinded them and made them meet this process.
    ours = {"beat": "2199023255552", "failure": "garbage", "met": "", "token": "stranger"}
    for key in store.list_keys() + ["scope/join/0", "scope/join/1", "scope/roster", "scope/run"]:
        words = [word for word in ours if word in key]
        store.set(key, ours[words[0]] if words else "stranger")
    starts = {key.split("/")[1] for key in store.list_keys() if key.startswith("scope/")}
    for start in starts:
        store.set(f"scope/{start}/failure", "garbage")


joining = threading.Thread(target=join_as_rank_1)
joining.start()
for _ in range(int(sys.argv[3])):
    write_everywhere()
    time.sleep(1.0)
joining.join()
"""
STREAM = ["-m", "scope_runners.main", "stream", "--json", "--seed", "7", "--seconds", "12"]
STREAM += ["--prompt", "a red circle", "--plan", "pp1", "--oversubscribe"]
# What gloo writes to the store is not sealed: where a stranger writes over that before it is read,
# ranks wait for each other until this bound, and the launcher starts them again.
BOUND = {"SCOPE_START_TIMEOUT_S": "30"}


class Launched:
    """A stream of this machine, on which another process may look meanwhile."""

    def __init__(self, folder: Path, name: str) -> None:
        self.log, self._summary = folder / f"{name}.log", folder / f"{name}.txt"
        with self.log.open("wb") as log, self._summary.open("wb") as summary:
            command = [sys.executable, *STREAM, "--out", str(folder / f"{name}.mp4")]
            self.process = warm_python.Process(
                command, env=os.environ | BOUND, stdout=summary.fileno(), stderr=log.fileno()
            )

    def store_port(self) -> int:
        """Where the launcher's store listens, as soon as it does."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s:
            if ports := ports_of([self.process.pid]):
                return min(ports)
            time.sleep(0.005)
        raise TimeoutError("the launcher listens nowhere")

    def digests(self) -> list[str]:
        """Of all chunks, once the stream has ended."""
        try:
            code = self.process.wait(100)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{error}; it said:\n{self.log.read_text()}") from None
        assert code == 0, self.log.read_text()
        chunks: list[dict[str, Any]] = json.loads(self._summary.read_text())["chunks"]
        return [chunk["latents_sha256"] for chunk in chunks]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may start a process as another user")
def test_another_user_who_takes_a_rank_over_is_refused_by_name_and_the_stream_goes_on(
    tmp_path: Path,
) -> None:
    undisturbed = Launched(tmp_path, "alone").digests()
    attacked = Launched(tmp_path, "attacked")
    port = attacked.store_port()
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-c", STRANGER, str(port), str(NOBODY), "3"]
        stranger = warm_python.Process(command, stdout=said.fileno(), stderr=said.fileno())
        try:
            assert attacked.digests() == undisturbed
        finally:
            with suppress(Exception):
                stranger.wait(20)
            stranger.kill()
            attacked.process.kill()
        said.seek(0)
        words = said.read().decode()
    log = attacked.log.read_text()
    assert f"connected as user {NOBODY}" in words
    assert "TOOK RANK 1 OVER" not in words
    assert "refused: meeting the other ranks" in words, words
    assert "was not written by a rank that knows this stream's secret" in log
    assert log.count("starting again") <= 1, log
