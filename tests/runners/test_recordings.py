"""A recording is one stream's: no other stream writes into it or takes its place."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scope_rt.control.chunk import Chunk
from scope_rt.session import StreamSession
from scope_runners.main import main
from tests.runners.streams import SHORT, as_rank_0_of_torchrun, contents, lose_the_link_after


def test_a_restart_replaces_no_recording_of_another_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts again what was refused, and tells the ranks that it is a restart."""
    scope = tmp_path / "a.scope"
    assert main([*SHORT, "--out", str(tmp_path / "a.mp4"), "--record", str(scope)]) == 0
    held = contents(tmp_path)
    as_rank_0_of_torchrun(monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert main([*SHORT, "--out", str(tmp_path / "b.mp4"), "--record", str(scope)]) == 2
    assert f"--record {scope} is there already" in capsys.readouterr().err
    assert contents(tmp_path) == held


def test_of_two_streams_that_begin_one_recording_at_a_time_one_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has looked already, when this one begins, streams and ends."""
    scope, whole = tmp_path / "a.scope", StreamSession.stream

    def behind_another(session: StreamSession, *args: Any, **options: Any) -> Iterator[Chunk]:
        monkeypatch.setattr(StreamSession, "stream", whole)
        assert main([*SHORT, "--out", str(tmp_path / "a.mp4"), "--record", str(scope)]) == 0
        held.update(contents(tmp_path))
        del held[tmp_path / ".b.mp4.0.partial.nut"]  # that of a video which never begins
        return whole(session, *args, **options)

    held: dict[Path, bytes] = {}
    monkeypatch.setattr(StreamSession, "stream", behind_another)
    assert main([*SHORT, "--out", str(tmp_path / "b.mp4"), "--record", str(scope)]) == 2
    assert f"--record {scope} is there already" in capsys.readouterr().err
    assert contents(tmp_path) == held


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_video_in_another_format_replaces_no_summary(
    is_under_way: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`a.mp4` and `a.webm` would both write `a.json` and `a.png`."""
    out, other = tmp_path / "a.mp4", tmp_path / "a.webm"
    if is_under_way:
        lose_the_link_after(2, out)
    else:
        assert main([*SHORT, "--out", str(out)]) == 0
    held = contents(tmp_path)
    assert main([*SHORT, "--out", str(other)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"output {other}: {out} has its summary and contact sheet at a.json and a.png" in said
    assert contents(tmp_path) == held
    assert main([*SHORT, "--out", str(out), *(["--resume"] if is_under_way else [])]) == 0


def test_a_video_that_someone_else_made_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    assert main([*SHORT, "--out", str(tmp_path / "a.webm")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.webm", "a.png", "a.json"}
