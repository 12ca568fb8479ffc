"""A rank found something wrong and rank0 was lost before it could retract: whoever resumes does it
first, and a kill at any change of the disk loses no retraction."""

import shutil
from pathlib import Path

import pytest

from scope_rt.environment_names import AFTER_WRONG, UNSAID
from scope_rt.session import StreamSession
from tests.integrity.resumed_streams import AT, LOST, broken, settings_in
from tests.record.killed import Report, lives

LEFT = "left"


def resume(folder: Path, report: Report) -> None:
    """Resume the stream that was left, and show a chunk."""
    shutil.copytree(folder.parent.parent / LEFT, folder, dirs_exist_ok=True)
    with StreamSession(settings_in(folder, resume=True)) as session:
        next(session.stream("none", acknowledged=lambda: 0))


@pytest.mark.timeout(240)
def test_a_resume_killed_before_it_says_what_is_retracted_says_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(tmp_path / "made", LOST)
    (tmp_path / "made").rename(tmp_path / LEFT)  # a copy of it is resumed where it is, not here
    monkeypatch.setenv(AFTER_WRONG, UNSAID)
    found = set[tuple[int | None, bool]]()
    for life, _ in lives(resume, tmp_path / "lives", step=5):
        monkeypatch.delenv(AFTER_WRONG, raising=False)  # a person resumes, whom nobody tells
        with StreamSession(settings_in(life, resume=True)) as session:
            found.add((session.resumed_at_chunk, bool(session.retractions)))
    assert (AT, False) in found, "killed before anything was said or changed"
    assert (AT, True) not in found, "what was retracted is not shown as it was"
    assert {said for first, said in found if first != AT} == {True}
