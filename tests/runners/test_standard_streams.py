"""A stream whose standard streams were closed makes its video all the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runners.streams import num_frames


@pytest.mark.parametrize(
    ("plan", "closed"),
    [pytest.param("single", ">&- 2>&-", marks=pytest.mark.lab), ("pp1", "<&- >&- 2>&-")],
)
def test_closed_standard_streams_cost_no_video(plan: str, closed: str, tmp_path: Path) -> None:
    out = tmp_path / "a.mp4"
    command = f'"$0" -m scope_runners.main stream --prompt "a red circle" --seconds 1 {closed}'
    more = ["--plan", plan, "--oversubscribe", "--out", str(out)]
    shell = ["sh", "-c", f'{command} "$@"', sys.executable, *more]
    assert subprocess.run(shell, stdin=subprocess.DEVNULL, timeout=100).returncode == 0
    assert num_frames(out) == 24
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


def test_a_mistake_has_its_exit_code_where_nobody_hears_it() -> None:
    script = '"$0" -m scope_runners.main stream --prompt "a red dog" 2>&-'
    done = subprocess.run(["sh", "-c", script, sys.executable], capture_output=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, b"")
