"""A replay in a process of its own, for programs that are not ranks themselves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from scope_contracts.envelope import PlanId


def replayed(
    recording: Path, *, plan: PlanId, tp: int, log: Path, timeout_s: float
) -> dict[str, Any] | None:
    """What `scope-rt replay --json` says of `recording`, or None, and then `log` says why.

    One that takes longer than `timeout_s` is ended. The plan that needs the fewest processes is
    taken; it makes the same bits at the same `tp`.
    """
    plan = PlanId.SINGLE if tp == 1 else plan
    command = [sys.executable, "-m", "scope_runners.main", "replay", str(recording), "--json"]
    command += ["--plan", plan, "--tp", str(tp)]
    with log.open("ab") as errors:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            errors.write(f"replay: no end within {timeout_s:g} s\n".encode())
            return None
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return None
    return report
