"""A guide's blocks are saved and run as its reader would; not a test itself."""

import os
import re
import shlex
import sys
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


def blocks(guide: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", guide.read_text(), re.M | re.S)


def commands(guide: Path) -> list[str]:
    """Every line of its shell blocks, in order."""
    return [line for block in blocks(guide, "sh") for line in block.splitlines()]


def save_files(guide: Path, folder: Path, *, only: str = "") -> None:
    """Every Python block is a file, named in its first line; or that of one name alone."""
    for block in blocks(guide, "python"):
        first = block.splitlines()[0]
        assert re.fullmatch(r"# \w+\.py", first), f"{guide.name}: a block begins with {first!r}"
        name = first.removeprefix("# ")
        if name == only or not only:
            (folder / name).write_text(block)


def packages(source: Path) -> list[Path]:
    """The folders of a source tree that hold its packages."""
    return [source / package for package in PACKAGES]


def run(command: str, folder: Path, *, server: warm_python.Server | None = None) -> str:
    """Run a line as the reader would, in a warm process with the packages of `server`, by default
    those of this repository; what it printed."""
    words = shlex.split(command)
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, server.packages if server else packages(ROOT))),
        "CUDA_VISIBLE_DEVICES": "",
    }
    if words[0] == "env":
        name, value = words[1].split("=")
        environ[name] = value
        del words[:2]
    words[:1] = [sys.executable, *STARTS[words[0]]]
    said = warm_python.run(words, cwd=folder, env=environ, timeout=TIMEOUT_S, server=server)
    assert said.returncode == 0, f"{command}:\n{said.stderr}"
    return said.stdout
