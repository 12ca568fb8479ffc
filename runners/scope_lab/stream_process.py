"""`scope-rt stream` in a process of its own, and bounded, for programs that time it."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

from scope_contracts.errors import ScopeError

MOST_S = 600.0
"""A stream of some chunks that takes longer is not worth timing."""


def plan_speed(
    plan: str,
    tp: int,
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = MOST_S,
) -> float:
    """Frames/s of a stream on `--plans plan`, end to end, from its first frame on.

    Raises:
        ScopeError: the command failed, or was ended after `timeout_s`.
    """
    command = [sys.executable, "-m", "scope_runners.main", "stream", "--json", "--plan", plan]
    command += ["--tp", str(tp), "--oversubscribe", *arguments]
    name, fix = f"--plans {plan} --tp {tp}", "change or drop it"
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, env=environ, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ScopeError(f"{name} did not end within {timeout_s:g} s; {fix}") from error
    if done.returncode:
        raise ScopeError(f"{name} failed as said above; {fix}")
    summary = json.loads(done.stdout)
    num_frames = summary["totals"]["frames"]
    streaming_s = num_frames / summary["frames_per_s"]["end_to_end"]
    later_frames = num_frames - summary["chunks"][0]["frames"]
    return float(later_frames / (streaming_s - summary["first_frame"]["since_ready_s"]))
