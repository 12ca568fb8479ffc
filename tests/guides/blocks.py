"""A guide's blocks are saved and run as its reader would; not a test itself."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import warm_python

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "runbooks" / "guides"
TIMEOUT_S = 100
PACKAGES = (".", "contracts", "runners")
STARTS = {
    "scope-rt": ["-m", "scope_runners.main"],
    "torchrun": ["-m", "torch.distributed.run"],
    "python": [],
}
"""What a command is to the interpreter."""
RUN_FILE = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def blocks(guide: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", guide.read_text(), re.M | re.S)


def commands(guide: Path) -> list[str]:
    """Every line of its shell blocks, in order."""
    return [line for block in blocks(guide, "sh") for line in block.splitlines()]


def save_files(guide: Path, folder: Path) -> None:
    """Every Python block is a file, named in its first line."""
    for block in blocks(guide, "python"):
        first = block.splitlines()[0]
        assert re.fullmatch(r"# \w+\.py", first), f"{guide.name}: a block begins with {first!r}"
        (folder / first.removeprefix("# ")).write_text(block)


def run(command: str | Sequence[str], folder: Path, *, source: Path = ROOT) -> str:
    """Run a line as the reader would, with the packages of `source`; what it printed.

    With those of this repository it is a warm process.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    is_warm = words[0] in STARTS and source == ROOT
    if words[0] == "python" and is_warm:
        words[:2] = [sys.executable, "-c", RUN_FILE, words[1]]
    elif words[0] in STARTS:  # the installed scope-rt is of this repository, not of `source`
        words[:1] = [sys.executable, *STARTS[words[0]]]
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(source / package) for package in PACKAGES),
        "CUDA_VISIBLE_DEVICES": "",
    }
    if is_warm:
        said = warm_python.run(words, cwd=folder, env=environ, timeout=TIMEOUT_S)
    else:
        said = subprocess.run(
            words,
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    assert said.returncode == 0, f"{command}:\n{said.stderr}"
    return said.stdout
