"""The tests that the suite leaves out because they take minutes: those marked `lab`."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str]) -> int:
    """Run them with further arguments for pytest; its exit code."""
    command = [sys.executable, "-m", "pytest", "-m", "lab", *(argv or ["tests"])]
    return subprocess.run(command, cwd=ROOT, check=False).returncode
