"""Two hosts, each with a torchrun of its own, lose each other and find each other again."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scope_lab.main import main as lab
from scope_lab.two_hosts import CUT_NAMED_S, KILL_NAMED_S
from scope_runners.namespaces import CabledHosts, Host, why_not
from tests.tiny_folder import write_tiny_folder

reason = why_not()
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(reason is not None, reason=str(reason)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


def two_hosts(model: Path, out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "scope_lab.main", "two_hosts", "--model", str(model)]
    command += ["--out", str(out), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_folder_that_holds_anything_is_refused_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("wedding-livestream.mp4", "stream.mp4", "notes.txt"):
        (tmp_path / name).write_text("mine")
    for out in (tmp_path, tmp_path / "notes.txt"):
        assert lab(["two_hosts", "--out", str(out)]) == 2
        assert "is not an empty folder; choose another --out" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"] * 3


def left_behind() -> set[str]:
    """Namespaces of this process, or of one that has ended; tests beside this one have theirs."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    makers = {
        line.split()[0]: line.split()[0].rpartition("-")[2] for line in listed.stdout.splitlines()
    }
    return {
        name
        for name, pid in makers.items()
        if pid == str(os.getpid()) or not Path("/proc", pid).exists()
    }


@pytest.mark.lab
def test_a_stream_survives_a_cut_cable(model: Path, tmp_path: Path) -> None:
    before = left_behind()
    report = two_hosts(model, tmp_path, "--lasts", "8", "--seconds", "60")
    assert left_behind() == before
    first, second = report["hosts"]
    assert "rank 1 sent no heartbeat" in first["said"]
    assert " ERROR rank1 stream=" in second["said"]
    assert "did not answer" in second["said"]
    assert max(first["named_s"], second["named_s"]) < CUT_NAMED_S
    assert report["resumed_s"] > report["restored_s"]
    assert report["chunks"] == report["chunks_replayed"] == 80
    assert (report["restarts"], report["largest_diff"]) == (1, 0.0)


@pytest.mark.lab
def test_a_stream_resumes_when_only_the_other_host_counts_a_restart(
    model: Path, tmp_path: Path
) -> None:
    report = two_hosts(model, tmp_path, "--fault", "rank", "--seconds", "60")
    assert "rank 1 closed the connection" in report["hosts"][0]["said"]
    assert report["hosts"][0]["named_s"] < KILL_NAMED_S
    assert report["resumed_at_chunk"] > 0
    assert report["chunks"] == report["chunks_replayed"] == 80


@pytest.mark.lab
def test_a_stream_waits_for_a_host_that_was_started_again(model: Path, tmp_path: Path) -> None:
    report = two_hosts(model, tmp_path, "--fault", "host", "--lasts", "1", "--seconds", "60")
    assert report["hosts"][0]["named_s"] < KILL_NAMED_S
    assert report["resumed_at_chunk"] > 0
    assert report["chunks"] == report["chunks_replayed"] == 80


LISTEN = """
import socket
server = socket.create_server(("0.0.0.0", 80))
print("listens", flush=True)
while True:
    server.accept()[0].close()
"""
KNOCK = """
import socket, sys
socket.create_connection((sys.argv[1], 80), timeout=1.0)
"""


def reaches(host: Host, other: Host) -> bool:
    """Whether a connection from `host` to `other` can be made, tried for some seconds."""
    for _ in range(5):
        knock = host.start(
            [sys.executable, "-c", KNOCK, other.address], environ={}, output=subprocess.DEVNULL
        )
        if knock.wait(30) == 0:
            return True
    return False


def test_nothing_passes_a_cut_cable_and_nothing_outlives_the_hosts() -> None:
    before = left_behind()
    with CabledHosts() as cabled:
        first, second = cabled.hosts
        server = second.start([sys.executable, "-c", LISTEN], environ={}, output=subprocess.PIPE)
        assert server.stdout is not None
        with server.stdout as said:
            assert said.readline() == b"listens\n"
        assert reaches(first, second)
        cabled.cut()
        assert not reaches(first, second)
        cabled.restore()
        assert reaches(first, second)
        assert second.processes() == [server.pid]
    assert server.wait(5) == -signal.SIGKILL
    assert left_behind() == before
