"""A guide that changes the package says all that must be changed, and its commands then work."""

import re
import shutil
import subprocess
from collections.abc import Iterator
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

CACHE_POLICY = GUIDES / "your-own-cache-policy.md"
BACKEND = GUIDES / "attention-backend-and-plan.md"
ADDED = {
    CACHE_POLICY: ("landmark_frames.py", "scope_rt/kv_cache"),
    BACKEND: ("blocks.py", "scope_rt/attention"),
}


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[warm_python.Server]:
    """Processes with a copy of the packages, each guide's file in place and its patch applied."""
    folder = tmp_path_factory.mktemp("changed")
    source = folder / "source"
    source.mkdir()
    for package in ("scope_rt", *PACKAGES[1:]):
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for guide, (added, into) in ADDED.items():
        save_files(guide, source / into, only=added)
        (patch,) = blocks(guide, "diff")
        command = ["git", "apply", "-"]
        subprocess.run(command, input=patch, text=True, cwd=source, check=True, timeout=30)
    with warm_python.Server(folder / "warm", *packages(source)) as server:
        yield server


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_cache_policy_of_ones_own_streams_and_replays(
    changed: warm_python.Server, tmp_path: Path
) -> None:
    save_files(CACHE_POLICY, tmp_path)
    tried, *streamed = commands(CACHE_POLICY)
    printed = run(tried, tmp_path)
    assert f"prints `{printed.strip()}`" in CACHE_POLICY.read_text()
    printed = [run(command, tmp_path, server=changed) for command in streamed][-1]
    assert "landmarks:int8" in run("scope-rt inspect landmarks.scope", tmp_path, server=changed)
    assert printed.endswith("result     equal\n")


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_an_attention_backend_of_ones_own_streams(
    changed: warm_python.Server, tmp_path: Path
) -> None:
    save_files(BACKEND, tmp_path)
    tried, *streamed = commands(BACKEND)
    assert run(tried, tmp_path) == "True\nTrue\n"
    stream, inspect = streamed
    run(stream, tmp_path, server=changed)
    assert ", blocks, model " in run(inspect, tmp_path, server=changed)


@pytest.mark.parametrize("guide", sorted(path.name for path in GUIDES.glob("*.md")))
def test_every_path_that_a_guide_names_is_there(guide: str) -> None:
    text = (GUIDES / guide).read_text()
    named = set(
        re.findall(r"`((?:scope_rt|contracts|runners|runbooks|tests|scripts)/[^\s`*]+)`", text)
    )
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    for link in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", text):
        assert (GUIDES / link).exists(), link
