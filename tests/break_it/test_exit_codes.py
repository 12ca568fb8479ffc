"""A rank that dies after its last word is seen, in whatever way it had said it would end."""

from pathlib import Path

import pytest

from scope_runners import rank_group
from scope_runners.break_it import watch
from scope_runners.break_it.catalogue import case_named
from scope_runners.break_it.suite import Suite
from scope_runners.break_it.verdict import Verdict

ABORTING_RANK = """
import os
from scope_runners.break_it import rank_main

def main(argv):
    rank_main.main(argv)
    os.abort()
"""


@pytest.mark.parametrize(
    ("name", "end"), [("disk-full", "left"), ("r0a/omitted", "PreflightError")]
)
def test_an_abort_after_the_last_word_is_a_complaint(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, end: str
) -> None:
    case = case_named(name)
    suite.driver.pace(case.default_topology)
    monkeypatch.setattr(rank_group, "LINGER_S", 30.0)  # an abort takes its time
    (tmp_path / "aborting_rank.py").write_text(ABORTING_RANK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(watch, "RANK_MODULE", "aborting_rank")
    result = suite.run(case)
    assert result.verdict is Verdict.FAILED
    assert f"rank 0 of attempt 0: {end}, and its exit code was -6" in result.complaints
