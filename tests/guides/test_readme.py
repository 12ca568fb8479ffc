"""What the READMEs tell a reader to run runs as it is written, and what they link to is there."""

import re
from pathlib import Path

import pytest

from scope_contracts.envelope import PlanId
from scope_rt.topology import RUNNABLE, Topology, plan_named
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


def test_the_table_of_plans_counts_the_processes_that_are_started() -> None:
    text, plans = (ROOT / "README.md").read_text(), list[str]()
    for plan, tp, num_processes in re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", text, re.M):
        if plan not in RUNNABLE:
            continue
        plans.append(plan)
        smallest = Topology.of(plan_named(plan), None)
        assert tp in ("1", f"N from {smallest.tp_degree}")
        count = {"1": 1, "N": smallest.tp_degree, "N + 1": smallest.tp_degree + 1}[num_processes]
        assert count == smallest.world_size
    assert plans == [*RUNNABLE]
    (told,) = re.findall(
        r"--nproc-per-node (\d+) -m\s+scope_runners.stream --plan pp1 --tp 4", text
    )
    assert int(told) == Topology.of(PlanId.PP1, 4).world_size


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_first_page_is_read_in_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
