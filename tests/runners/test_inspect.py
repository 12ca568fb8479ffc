"""A recording is read by a person: what happened stands in its place, in words and in colours."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from scope_contracts.errors import ContractError, UserInputError
from scope_contracts.log_records import Closed, Control, Failed, Opened
from scope_contracts.tensor_spec import DType
from scope_lab.sample_log import finished, opened, packed, planned, story, write
from scope_rt.record.reader import open_log
from scope_runners.inspect_recording import add_inspect_arguments, run_inspect
from scope_runners.main import main
from tests.damage import flip


def inspect(path: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_inspect_arguments(parser)
    return run_inspect(parser.parse_args([str(path), *arguments]))


def later_version() -> Opened:
    """The first record of a recording that a later scope-rt made."""
    return replace(opened(), log_version=99)


def row(table: str, chunks: str) -> str:
    return next(line for line in table.splitlines() if line.strip().startswith(chunks + "  "))


def as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert inspect(path, "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert isinstance(read, dict)
    return read


def test_the_table_tells_what_happened_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(write(tmp_path / "a.scope", story())) == 0
    table = capsys.readouterr().out
    for words in (
        "tiny, pp1 tp 2, 64x64 at 16 frames/s, seed 7, float32, h2o:int8 cache, bias 0.8",
        "7 chunks (5.2 s of video), 2 epochs, 1 dropped, 1 recompute, 1 restart; ended in order",
        'prompt "a green square" over 3 chunks (slerp, bias to 0.2)',
        "hard cut, dropping what was in flight",
        "restart, 3.0 s after the last record",
    ):
        assert words in table
    below = table.split("\n")
    at = below.index(row(table, "5"))
    assert below[at + 1].strip() == "dropped: it came after a hard cut"
    events = [line.strip() for line in below]
    again = events.index("restart, 3.0 s after the last record")
    assert events[again - 1] == "failed, with chunk 7 planned last: PeerLostError: rank 2 is gone"
    assert sum("PeerLostError" in event for event in events) == 1
    assert row(table, "3").split() == ["3", "2.25", "0", "3", "0.40", "50.0", "9.0", "4.0"]


def test_a_failure_before_any_chunk_was_planned_again_is_told_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = story()
    at = next(place for place, (record, _) in enumerate(records) if isinstance(record, Failed))
    failed = records[at]
    inspect(write(tmp_path / "a.scope", [*records[: at + 2], failed]))
    events = [line.strip() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert "PeerLostError" in events[0]
    assert events[1].startswith("7   restart, ")
    assert events[2] == "7   failed, with chunk 7 planned last: PeerLostError: rank 2 is gone"


def test_chunks_without_news_share_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = [item for index in range(30) for item in ((planned(index), b""), finished(index))]
    asked = (Control(at_s=0.0, chunk_index=20, recompute=True), b"")
    inspect(write(tmp_path / "a.scope", [(opened(), b""), asked, *chunks]))
    table = capsys.readouterr().out
    assert [line[:13].strip() for line in table.splitlines()[6:]] == ["0 - 19", "20", "", "21 - 29"]
    assert "cut off, or still going on" in table


def test_the_settings_are_told_that_a_stream_was_made_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = opened(
        settings="plan=pp1 integrity=strict; broken on purpose: a fault",
        recipe="krea-14b",
        codec_dtype=DType.FLOAT32,
        text_dtype=DType.BFLOAT16,
    )
    inspect(write(tmp_path / "a.scope", [(first, b""), *story()[1:]]))
    rows = capsys.readouterr().out.splitlines()
    assert "recipe     krea-14b; codec float32, text encoder bfloat16" in rows
    assert "settings   plan=pp1 integrity=strict" in rows
    assert "broken     on purpose: a fault" in rows


def test_a_restart_with_another_tp_degree_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [(opened(), b""), (planned(0), b""), finished(0)]
    later = [(opened(tp_degree=1, resumed_at_chunk=1), b""), (planned(1), b""), finished(1)]
    inspect(write(tmp_path / "a.scope", [*first, *later]))
    assert "later      pp1 tp 1, from chunk 1 on" in capsys.readouterr().out.splitlines()
    inspect(write(tmp_path / "b.scope", story()))
    assert "later " not in capsys.readouterr().out


def test_chunks_without_latents_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [(planned(0), b""), finished(0)]
    bare = [
        each
        for index in (1, 2)
        for each in ((planned(index), b""), (replace(finished(index)[0], latents=None), b""))
    ]
    inspect(write(tmp_path / "a.scope", [(opened(), b""), *kept, *bare]))
    said = "latents    of 2 chunks are not in the file, from chunk 1 on; a replay leaves them out"
    assert said in capsys.readouterr().out.splitlines()
    inspect(write(tmp_path / "b.scope", [(opened(), b""), *kept]))
    assert "latents" not in capsys.readouterr().out


def test_json_has_every_chunk_and_forgets_what_a_restart_did_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = story()
    lost = [finished(7, 1, values=(5.0, 5.0)), (planned(8, 1), b"")]
    read = as_json(write(tmp_path / "a.scope", records[:-5] + lost + records[-5:]), capsys)
    assert [chunk["chunk_index"] for chunk in read["chunks"]] == list(range(8))
    assert [chunk["fate"] for chunk in read["chunks"]] == ["shown"] * 5 + ["dropped"] + [
        "shown"
    ] * 2
    assert read["chunks"][7]["latents_sha256"] == finished(7)[0].latents_sha256
    assert read["chunks"][7]["do_kv_recompute"] is True
    assert read["chunks"][7]["start_s"] == 4.5
    assert read["lost_chunks"] == 2
    assert [control["chunk_index"] for control in read["controls"]] == [0, 2, 6]
    assert read["closed"] is True


def test_a_crash_is_told_with_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.scope"
    path.write_bytes(packed(story()[:10])[:-3])
    read = as_json(path, capsys)
    assert [chunk["fate"] for chunk in read["chunks"]] == ["shown", "unfinished"]
    assert (read["closed"], read["torn_bytes"] > 0) == (False, True)
    assert inspect(path) == 0
    table = capsys.readouterr().out
    assert f"cut off in the middle of a record ({read['torn_bytes']} bytes" in table
    assert "planned, and not finished" in table


def test_damage_is_an_error_after_what_is_whole_was_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.scope", story())
    flip(path, len(packed(story()[:8])) + 20)
    with pytest.raises(ContractError, match="the log is damaged"):
        inspect(path)
    assert "1 chunk (0.8 s of video)" in capsys.readouterr().out


@pytest.mark.parametrize("left", [b"", b"\x89SCO", packed([])])
def test_a_file_without_a_whole_record_is_said_to_be_that(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "a.scope"
    path.write_bytes(left)
    with pytest.raises(UserInputError, match=r"a\.scope: .*no whole record.*; record a stream"):
        inspect(path)


def test_a_file_that_cannot_be_read_is_the_users_to_change(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.scope", tmp_path):
        with pytest.raises(UserInputError, match="give a file that --record wrote"):
            inspect(path)


def test_another_kind_of_file_is_the_users_to_change(tmp_path: Path) -> None:
    video = tmp_path / "a.mp4"
    video.write_bytes(b"\0\0\0\x1cftypisom")
    with pytest.raises(UserInputError, match=r"a\.mp4 is no recording; give a file that --record"):
        inspect(video)


@pytest.mark.parametrize("command", ["inspect", "replay"])
@pytest.mark.parametrize(
    ("content", "sentence", "code"),
    [
        (b"", "the recording has no whole record; nothing was kept; record a stream again", 2),
        (packed(story())[:200], "no whole record; nothing was kept; record a stream again", 2),
        (packed([(later_version(), b"")]), "_version: got 99, want ", 2),
        (b"hello", "a.scope is no recording; give a file that --record wrote", 2),
        (None, "(No such file or directory); give a file that --record wrote", 2),
        ("folder", "is no ordinary file; give a file that --record wrote", 2),
    ],
)
def test_what_is_no_recording_is_refused_with_its_path_and_the_fix(
    command: str,
    content: bytes | str | None,
    sentence: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a.scope"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    assert main([command, str(path)]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("scope-rt: ")
    assert printed.err.count("\n") == 1
    assert str(path) in printed.err
    assert sentence in printed.err


def test_damage_is_told_with_the_path_and_the_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.scope", story())
    flip(path, len(packed(story()[:4])) + 20)
    assert main(["inspect", str(path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"scope-rt: the recording {path}: byte ")
    assert told.endswith("; copy the file again from where it was written\n")


def test_a_picture_replaces_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording, sheet = write(tmp_path / "a.scope", story()), tmp_path / "a.png"
    sheet.write_bytes(b"a contact sheet")
    assert main(["inspect", str(recording), "--picture", str(sheet)]) == 2
    assert f"--picture {sheet} is there already; choose another name" in capsys.readouterr().err
    assert sheet.read_bytes() == b"a contact sheet"


def test_a_hostile_text_moves_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bell = Control(at_s=0.0, chunk_index=0, prompt="\x1b[2J\a\x9b1A\n", embeds_sha256="c")
    inspect(
        write(tmp_path / "a.scope", [(opened(model="\x1b]0;"), b""), (bell, b""), *story()[5:7]])
    )
    table = capsys.readouterr().out
    assert 'prompt "?[2J??1A?"' in table
    assert all(character.isprintable() for character in table.replace("\n", ""))


def test_the_picture_shows_cut_restart_and_recompute_where_they_were(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    inspect(write(tmp_path / "a.scope", story()), "--picture", str(path), "--json")
    with Image.open(path) as picture:
        assert 900 < picture.width < 1100
        pixels = picture.convert("RGB")
    columns: dict[tuple[int, ...], list[int]] = {}
    for x in range(110, pixels.width):
        for colour in {pixels.getpixel((x, y)) for y in range(160, 480)}:
            assert isinstance(colour, tuple)
            columns.setdefault(colour, []).append(x)
    chunk_px = 900 / 8
    cut, restart = columns[240, 96, 96], columns[250, 170, 60]
    assert cut[0] == pytest.approx(110 + 6 * chunk_px, abs=1)
    assert restart[0] == pytest.approx(110 + 7 * chunk_px, abs=1)
    dropped = range(round(110 + 5 * chunk_px), round(110 + 6 * chunk_px) - 2)
    assert not set(dropped) & set(columns[88, 190, 130])
    assert len(columns[88, 190, 130]) > 6 * chunk_px


def test_a_picture_of_a_long_stream_has_a_bounded_size(tmp_path: Path) -> None:
    chunks = [item for index in range(3000) for item in ((planned(index), b""), finished(index))]
    cuts = [
        (Control(at_s=0.0, chunk_index=index, hard_cut=True), b"") for index in range(0, 3000, 9)
    ]
    path = tmp_path / "a.png"
    recording = write(tmp_path / "a.scope", [(opened(), b""), *chunks, *cuts])
    inspect(recording, "--picture", str(path), "--json")
    with Image.open(path) as picture:
        assert picture.width < 2000
        assert picture.height < 1500


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_valid_recording_can_be_shown(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Nothing in a record is trusted to be sensible: indices, times and texts may be anything."""
    folder = tmp_path_factory.mktemp("any")
    integers = st.integers(0, 2**62)
    records = data.draw(st.lists(st.sampled_from(story()), max_size=12))
    record, latents = finished(0)
    strange = replace(
        record,
        chunk_index=data.draw(integers),
        num_frames=data.draw(integers),
        at_s=data.draw(st.floats(allow_nan=False, allow_infinity=False)),
        stage_ms=(("generate", data.draw(st.floats(allow_nan=False, allow_infinity=False))),),
    )
    plan = planned(
        data.draw(st.integers(-5, 2**62)),
        current_start_frame=0,
        kv_cache_attention_bias=data.draw(st.floats(allow_nan=False, allow_infinity=False)),
    )
    path = write(
        folder / "a.scope",
        [(opened(), b""), *records, (strange, latents), (plan, b""), (Closed(at_s=0.0), b"")],
    )
    assert inspect(path, "--picture", str(folder / "a.png")) == 0


def test_looking_at_a_recording_loads_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "a.scope", story())
    program = f"""
import sys
from tests.damage import flip
from tests.runners.test_inspect import inspect
inspect({str(path)!r})
assert "torch" not in sys.modules, "inspect takes seconds to start"
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, check=False)
    assert done.returncode == 0


def test_a_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserInputError, match="give a file that --record wrote"):
        open_log(tmp_path / "pipe")
