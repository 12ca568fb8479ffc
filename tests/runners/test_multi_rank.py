"""Plans change where a stream is made, not what is seen."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests import warm_python
from tests.multiprocess.ranks import free_port

STREAM = ["-m", "scope_runners.main", "stream", "--json", "--seconds", "3", "--seed", "7"]
STREAM += ["--prompt", "a red circle", "--prompt-at", "1s:a green square", "--hard-cut-at", "2s"]


def run(out: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, *STREAM, "--out", str(out), *arguments]
    done = warm_python.run(command, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    assert isinstance(summary, dict)
    return summary


def test_pp1_makes_the_chunks_of_single_and_shows_both_ranks(tmp_path: Path) -> None:
    single = run(tmp_path / "single.mp4")
    trace = tmp_path / "trace.json"
    pipelined = run(
        tmp_path / "pp1.mp4",
        *("--plan", "pp1", "--tp", "1", "--oversubscribe", "--trace", str(trace)),
    )
    assert pipelined["ranks"] == 2
    digests = [
        [(chunk["cache_epoch"], chunk["latents_sha256"]) for chunk in summary["chunks"]]
        for summary in (single, pipelined)
    ]
    assert len(digests[0]) == 4
    assert digests[0] == digests[1]
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if "dur" in event]
    assert {(event["pid"], event["cat"]) for event in spans} >= {(0, "decode"), (1, "generate")}


def test_a_rank_whose_peer_never_comes_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    command = [sys.executable, "-m", "scope_runners.stream", "--plan", "pp1"]
    command += ["--prompt", "a red circle", "--out", str(tmp_path / "video.mp4")]
    done = warm_python.run(
        command, env=os.environ | environ | {"SCOPE_START_TIMEOUT_S": "3"}, timeout=60
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "no secret" not in done.stderr, "that is for rank0 to say"
    assert "Z ERROR rank1 stream=video.mp4: LinkTimeoutError: meeting the other ranks" in last
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_stream_under_torchrun_without_a_secret_says_so_once(tmp_path: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(free_port()), "SCOPE_START_TIMEOUT_S": "1"}
    command = [sys.executable, "-m", "scope_runners.stream", "--plan", "pp1"]
    command += ["--prompt", "a red circle", "--out", str(tmp_path / "video.mp4")]
    done = warm_python.run(command, env=os.environ | environ, timeout=60)
    said = "this stream has no secret: whoever reaches its ports can join it; set SCOPE_STREAM_SEC"
    assert done.stderr.count(said) == 1
    given = os.environ | environ | {"SCOPE_STREAM_SECRET": "a" * 32}
    done = warm_python.run(command, env=given, timeout=60)
    assert done.returncode == 1
    assert "no secret" not in done.stderr
    assert "aaaa" not in done.stderr
