"""What the READMEs tell a reader to run runs as it is written, and what they link to is there."""

import re
from pathlib import Path

import pytest

from tests.guides.blocks import ROOT, TIMEOUT_S, commands, run, save_files

PAGES = sorted(
    path
    for pattern in ("*.md", "*/README.md", "*/*/README.md", "runbooks/*.md", "runbooks/guides/*.md")
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).parts[0].startswith(".")
)


@pytest.mark.timeout(6 * TIMEOUT_S)
@pytest.mark.parametrize(
    "page", ["README.md", "scope_rt/kv_cache/README.md", "scope_rt/lm/README.md"]
)
def test_every_command_of_a_readme_runs_in_order(page: str, tmp_path: Path) -> None:
    if page.startswith("scope_rt/lm"):
        pytest.importorskip("transformers")
    save_files(ROOT / page, tmp_path)
    said = [run(command, tmp_path) for command in commands(ROOT / page)]
    assert said
    if page == "README.md":
        assert (tmp_path / "out" / "first.scope").exists()
        assert "equal" in said[2]
        assert said[3].splitlines()[-1].startswith("7 a white circle, slow (12, 64, 64, 3)")
        assert (tmp_path / "out" / "three.mp4").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_first_page_is_read_in_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
