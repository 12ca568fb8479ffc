"""A guide that changes the package says all that must be changed, and its commands then work."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import warm_python
from tests.guides.blocks import (
    GUIDES,
    PACKAGES,
    ROOT,
    TIMEOUT_S,
    blocks,
    commands,
    packages,
    run,
    save_files,
)


def changed_source(guide: Path, folder: Path, added: str, into: str) -> warm_python.Server:
    """Processes with a copy of the packages, the guide's file in place and its patch applied."""
    source = folder / "source"
    source.mkdir()
    for package in ("scope_rt", *PACKAGES[1:]):
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(folder / added, source / into / added)
    (patch,) = blocks(guide, "diff")
    command = ["git", "apply", "-"]
    subprocess.run(command, input=patch, text=True, cwd=source, check=True, timeout=30)
    return warm_python.Server(folder / "warm", *packages(source))


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_cache_policy_of_ones_own_streams_and_replays(tmp_path: Path) -> None:
    guide = GUIDES / "your-own-cache-policy.md"
    save_files(guide, tmp_path)
    tried, *streamed = commands(guide)
    printed = run(tried, tmp_path)
    assert f"prints `{printed.strip()}`" in guide.read_text()
    with changed_source(guide, tmp_path, "landmark_frames.py", "scope_rt/kv_cache") as server:
        printed = [run(command, tmp_path, server=server) for command in streamed][-1]
        assert "landmarks:int8" in run("scope-rt inspect landmarks.scope", tmp_path, server=server)
    assert printed.endswith("result     equal\n")


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_an_attention_backend_of_ones_own_streams(tmp_path: Path) -> None:
    guide = GUIDES / "attention-backend-and-plan.md"
    save_files(guide, tmp_path)
    tried, *streamed = commands(guide)
    assert run(tried, tmp_path) == "True\nTrue\n"
    with changed_source(guide, tmp_path, "blocks.py", "scope_rt/attention") as server:
        stream, inspect = streamed
        run(stream, tmp_path, server=server)
        assert ", blocks, model " in run(inspect, tmp_path, server=server)


@pytest.mark.parametrize("guide", sorted(path.name for path in GUIDES.glob("*.md")))
def test_every_path_that_a_guide_names_is_there(guide: str) -> None:
    text = (GUIDES / guide).read_text()
    named = set(
        re.findall(r"`((?:scope_rt|contracts|runners|runbooks|tests|scripts)/[^\s`*]+)`", text)
    )
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    for link in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", text):
        assert (GUIDES / link).exists(), link
