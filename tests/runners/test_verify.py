"""Whether a stream's files are as they were written can be said later, file by file."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from scope_runners import show
from scope_runners.main import main
from scope_runners.verify import sealed
from tests.damage import flip
from tests.runners.streams import SHORT


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    out, record = folder / "a.mp4", folder / "a.scope"
    trace = ["--trace", str(folder / "t.json")]
    assert main([*SHORT, "--out", str(out), "--record", str(record), *trace]) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return copytree(made, tmp_path / "moved")


def without(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in summary.items() if key != "checksum"}


@pytest.mark.parametrize("named", ["a.mp4", "a.json", "a.scope"])
def test_whole_files_are_called_so_also_where_they_were_moved(
    folder: Path, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    assert main(["verify", str(folder / named), "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)
    want = {"a.scope"} if named == "a.scope" else {"a.mp4", "a.json", "a.png", "t.json"}
    assert {Path(verdict["path"]) for verdict in verdicts} == {folder / name for name in want}
    assert main(["verify", str(folder / named)]) == 0
    assert capsys.readouterr().out.count("as written") == len(want)


@pytest.mark.parametrize("name", ["a.mp4", "a.png", "t.json"])
@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_flipped_byte_anywhere_in_an_output_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, place: float
) -> None:
    path = folder / name
    flip(path, int(place * (path.stat().st_size - 1)))
    assert main(["verify", str(folder / "a.mp4")]) == 1
    out, said = capsys.readouterr()
    assert f"{path} is not what was written (its digest is" in said
    assert said.count("\n") == 1
    assert out.count("as written") == 3
    assert out.count(f"DAMAGED      {path}") == 1


def test_another_length_and_a_file_that_is_gone_are_named(
    folder: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = folder / "a.mp4"
    video.write_bytes(video.read_bytes() + b"x")
    assert main(["verify", str(folder / "a.json")]) == 1
    assert "bytes, " in capsys.readouterr().err
    video.write_bytes((made / "a.mp4").read_bytes())
    (folder / "a.png").unlink()
    summary = json.loads((folder / "a.json").read_text())
    summary["files"]["contact_sheet"] = str(folder / "gone" / "a.png")
    (folder / "a.json").write_text(json.dumps(sealed(without(summary))))
    assert main(["verify", str(folder / "a.json")]) == 1
    assert "a.png is not what was written (cannot be read: No such" in capsys.readouterr().err


def test_no_byte_of_a_summary_can_be_flipped_to_say_something_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = folder / "a.json"
    whole, told = summary.read_bytes(), json.loads(summary.read_bytes())
    for position in range(0, len(whole), max(1, len(whole) // 300)):
        summary.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            is_same = json.loads(summary.read_bytes()) == told
        except ValueError:
            is_same = False
        assert (main(["verify", str(summary)]) == 0) == is_same
    capsys.readouterr()


def test_damage_of_a_recording_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "a.scope"
    flip(path, path.stat().st_size // 2)
    assert main(["verify", str(path)]) == 1
    out, said = capsys.readouterr()
    assert out.startswith(f"recording      DAMAGED      {path}\n")
    assert said.startswith(f"scope-rt: the recording {path}: byte ")
    assert said.count("the log is damaged; ") == said.count("copy the file again") == 1


def test_what_is_none_of_them_is_refused_with_what_can_be_verified(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder / "a.png")]) == 2
    said = capsys.readouterr().err
    assert "give a file that --record wrote, or a video or its summary" in said


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"files": {}, "digests": [], "checksum": 1}'])
def test_what_is_no_summary_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "a.json").write_text(content)
    assert main(["verify", str(tmp_path / "a.mp4")]) == 2
    assert "is no summary of this version, or is damaged" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "b.mp4")]) == 2
    assert "cannot read the summary" in capsys.readouterr().err


def test_a_joined_video_that_changed_before_its_end_was_written_is_not_concluded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"

    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(show, "write_storyboard", interrupt)
        assert main([*SHORT, "--out", str(out)]) == 130
    whole = out.read_bytes()
    flip(out, len(whole) // 2)
    assert main([*SHORT, "--out", str(out), "--resume"]) == 2
    assert f"{out} is not the video that was written (its digest is" in capsys.readouterr().err
    out.write_bytes(whole)
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert main(["verify", str(out)]) == 0
