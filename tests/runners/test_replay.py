"""A recording comes out the same when it is run again, and a replay notices when it does not."""

import argparse
import json
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from scope_contracts.errors import ContractError, UserInputError
from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Control, Dropped, Finished, Opened, Planned, Record
from scope_contracts.tensor_spec import DType
from scope_lab.sample_log import Story, opened, story, write
from scope_rt.config import StreamConfig
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.models.file_contents import FileEntry
from scope_rt.models.folder_contents import FolderContents
from scope_rt.record.reader import open_log
from scope_rt.session import StreamSession
from scope_runners.recording_argument import read_recording
from scope_runners.replay import add_replay_arguments, prepare, run_replay
from tests import warm_python
from tests.rounding import TP_CONTRACT
from tests.tiny_folder import write_tiny_folder

SOFT = TransitionSpec(num_chunks=3, method=Interpolation.SLERP, bias_floor=0.2)
SCHEDULE = (
    ScheduledEvent(chunk_index=2, prompt="a green square", transition=SOFT),
    ScheduledEvent(chunk_index=5, recompute=True),
    ScheduledEvent(chunk_index=7, hard_cut=True, prompt="a blue triangle"),
)
NUM_CHUNKS = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def recording(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream with a soft transition, a forced recompute and a hard cut."""
    path = tmp_path_factory.mktemp("recording") / "a.scope"
    config = StreamConfig.of(
        model, seed=3, kv_cache_attention_bias=0.8, log=path, record_latents=True
    )
    with StreamSession(config) as session:
        chunks = session.stream("a red circle", num_chunks=NUM_CHUNKS, schedule=SCHEDULE)
        assert len(list(chunks)) == NUM_CHUNKS
    assert session.log.failure is None
    return path


def replay(recording: Path, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_replay_arguments(parser)
    return run_replay(parser.parse_args([str(recording), *arguments]), [])


def report(recording: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = replay(recording, "--json", *arguments)
    read = json.loads(capsys.readouterr().out)
    assert isinstance(read, dict)
    assert code == (0 if read["passed"] else 1)
    return read


def read_story(path: Path) -> Story:
    with path.open("rb") as file:
        reader = LogReader(file)
        return [(entry.record, reader.blob(entry)) for entry in list(reader)]


def changed(
    recording: Path, into: Path, change: Callable[[Record, bytes], tuple[Record, bytes]]
) -> Path:
    return write(into, [change(record, blob) for record, blob in read_story(recording)])


def test_the_same_plan_gives_equal_bits(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = report(recording, capsys)
    assert (read["passed"], read["compared"], read["not_compared"]) == (True, NUM_CHUNKS, 0)
    assert (read["tolerance"], read["largest_diff"], read["differences"]) == (0.0, 0.0, [])
    assert replay(recording) == 0
    assert capsys.readouterr().out.endswith("result     equal\n")


def test_one_changed_bit_is_found_in_its_chunk(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(record: Record, blob: bytes) -> tuple[Record, bytes]:
        if isinstance(record, Finished) and record.chunk_index in (4, 6):
            (value,) = struct.unpack_from("<f", blob)
            return record, struct.pack("<f", value + 0.5 * record.chunk_index) + blob[4:]
        return record, blob

    path = changed(recording, tmp_path / "b.scope", change)
    read = report(path, capsys)
    assert [difference["chunk_index"] for difference in read["differences"]] == [4, 6]
    assert read["differences"][0]["max_abs_diff"] == pytest.approx(2.0, abs=1e-3)
    assert read["largest_diff"] == pytest.approx(3.0, abs=1e-3)
    assert replay(path) == 1
    printed = capsys.readouterr().out
    assert "2 chunks DIFFER, the first is 4 (by 2); the largest difference is 3" in printed


def test_a_zero_of_the_other_sign_is_another_bit(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A difference of nothing at all still is one where equal bits are promised."""
    read = []
    for zero in (b"\x00\x00\x00\x00", b"\x00\x00\x00\x80"):

        def change(record: Record, blob: bytes, zero: bytes = zero) -> tuple[Record, bytes]:
            is_first = isinstance(record, Finished) and record.chunk_index == 0
            return record, zero + blob[4:] if is_first else blob

        read.append(report(changed(recording, tmp_path / "b.scope", change), capsys))
    assert all([d["chunk_index"] for d in one["differences"]] == [0] for one in read)
    assert read[0]["largest_diff"] == read[1]["largest_diff"]


def test_other_control_input_is_another_stream_and_the_field_is_named(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def steeper(record: Record, blob: bytes) -> tuple[Record, bytes]:
        if isinstance(record, Control) and record.transition_num_chunks:
            return replace(record, transition_bias_floor=0.1), blob
        return record, blob

    path = changed(recording, tmp_path / "b.scope", steeper)
    assert replay(path) == 1
    printed = capsys.readouterr().out
    assert "the first is 2" in printed
    assert "kv_cache_attention_bias: recorded 0." in printed


def test_what_a_live_cut_dropped_is_not_missed(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def drop(record: Record, blob: bytes) -> tuple[Record, bytes]:
        if isinstance(record, Finished) and record.chunk_index == 6:
            return Dropped(at_s=record.at_s, chunk_index=6, cache_epoch=0), b""
        return record, blob

    read = report(changed(recording, tmp_path / "b.scope", drop), capsys)
    assert (read["passed"], read["compared"], read["not_compared"]) == (True, NUM_CHUNKS - 1, 1)


def test_a_stream_that_was_started_again_is_one_that_recomputes_there(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The restart falls into a soft transition; the lost chunk's records are not the stream's."""
    record, snapshot = tmp_path / "a.scope", tmp_path / "snapshot"
    config = StreamConfig.of(model, seed=3, log=record, record_latents=True, snapshot=snapshot)

    def session(*, resume: bool) -> StreamSession:
        return StreamSession(config.with_settings(resume=resume))

    first = session(resume=False)
    chunks = first.stream("a red circle", num_chunks=NUM_CHUNKS, schedule=SCHEDULE)
    assert [next(chunks).chunk_index for _ in range(4)] == [0, 1, 2, 3]
    saved = shutil.copytree(snapshot, tmp_path / "saved")
    next(chunks)
    first.close()
    shutil.rmtree(snapshot, ignore_errors=True)
    saved.rename(snapshot)
    with record.open("ab") as file:
        file.write(b"\x99\x00\x00")
    with session(resume=True) as second:
        chunks = second.stream("", num_chunks=NUM_CHUNKS)
        assert [chunk.chunk_index for chunk in chunks][-1] == NUM_CHUNKS - 1
    envelopes = [r.envelope for r, _ in read_story(record) if isinstance(r, Planned)]
    assert [e.chunk_index for e in envelopes if e.do_kv_recompute] == [4, 5]
    read = report(record, capsys)
    assert (read["passed"], read["compared"]) == (True, NUM_CHUNKS)
    assert read["largest_diff"] == 0.0


def test_a_crash_leaves_a_recording_that_replays_to_its_last_whole_record(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.scope"
    path.write_bytes(recording.read_bytes()[: recording.stat().st_size // 2])
    read = report(path, capsys)
    assert read["passed"] is True
    assert 2 < read["compared"] < NUM_CHUNKS - 2


def test_damage_is_told_after_what_could_be_compared(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.scope"
    data = bytearray(recording.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ContractError, match="the log is damaged"):
        replay(path)
    assert "result     equal" in capsys.readouterr().out


def with_a_damaged_latent(recording: Path, into: Path, *, chunk_index: int) -> Path:
    data = bytearray(recording.read_bytes())
    data[read_recording(recording).places[chunk_index].end - 1] ^= 1
    into.write_bytes(data)
    return into


def test_a_damaged_latent_is_found_by_the_process_that_compares_and_read_by_no_other(
    recording: Path, tmp_path: Path
) -> None:
    path = with_a_damaged_latent(recording, tmp_path / "b.scope", chunk_index=5)
    parser = argparse.ArgumentParser()
    add_replay_arguments(parser)

    def damage(*arguments: str, launched: bool, rank: int = 0, world_size: int) -> str | None:
        environment = LaunchEnvironment(launched=launched, rank=rank, world_size=world_size)
        job = prepare(parser.parse_args([str(path), *arguments]), environment)
        assert job.num_chunks == (5 if job.recording.damage else NUM_CHUNKS)
        return None if job.recording.damage is None else str(job.recording.damage)

    pp1 = ("--plan", "pp1")
    for found in (
        damage(launched=False, world_size=1),
        damage(*pp1, launched=True, world_size=2),
    ):
        assert "the log is damaged" in str(found)
    assert damage(*pp1, launched=False, world_size=1) is None
    assert damage(*pp1, launched=True, rank=1, world_size=2) is None


def test_ranks_that_do_not_check_latents_replay_up_to_a_damaged_one(
    recording: Path, tmp_path: Path
) -> None:
    path = with_a_damaged_latent(recording, tmp_path / "b.scope", chunk_index=5)
    command = [sys.executable, "-m", "scope_runners.replay", str(path)]
    done = warm_python.run([*command, "--plan", "tp_v1_1", "--tp", "2"], timeout=100)
    assert done.returncode != 0
    assert "compared   5 chunks" in done.stdout
    assert "the log is damaged" in done.stderr


def test_the_replays_own_recording_can_be_kept_but_replaces_no_file(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, before = tmp_path / "kept.scope", recording.read_bytes()
    assert replay(recording, "--record", str(kept)) == 0
    for taken in (recording, kept):
        with pytest.raises(UserInputError, match="is there already; choose another name"):
            replay(recording, "--record", str(taken))
    assert recording.read_bytes() == before
    capsys.readouterr()
    assert report(kept, capsys)["passed"] is True


def test_another_model_is_refused_before_it_runs(
    recording: Path, tmp_path: Path, model: Path
) -> None:
    other = write_tiny_folder(tmp_path / "other")
    (other / "recipe.json").write_text((model / "recipe.json").read_text() + "\n")
    with pytest.raises(UserInputError, match="name the recorded one with --model"):
        replay(recording, "--model", str(other))
    assert replay(recording, "--model", str(model)) == 0


def test_the_recorded_past_is_let_go_of_when_the_replay_ends(
    recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = list[BinaryIO]()

    def opened_file(path: Path) -> BinaryIO:
        files.append(open_log(path))
        return files[-1]

    monkeypatch.setattr("scope_runners.replay.open_log", opened_file)
    assert replay(recording, "--tolerance", "1e-4") == 0
    assert [file.closed for file in files] == [True]


def test_a_model_that_this_machine_never_saw_is_read_once(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_read = Counter[Path]()
    read = FolderContents._read_file

    def counted(contents: FolderContents, path: Path) -> FileEntry:
        files_read[path] += 1
        return read(contents, path)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(FolderContents, "_read_file", counted)
    assert replay(recording) == 0
    assert set(files_read.values()) == {1}


@pytest.mark.parametrize("first", [opened(resumed_at_chunk=4), opened()])
def test_a_recording_without_the_streams_beginning_is_refused(
    recording: Path, tmp_path: Path, first: Opened
) -> None:
    fingerprint = read_story(recording)[0][0]
    assert isinstance(fingerprint, Opened)
    first = replace(fingerprint, resumed_at_chunk=first.resumed_at_chunk)
    later = story()[13:-5]
    with pytest.raises(UserInputError, match="there is nothing to compare"):
        replay(write(tmp_path / "b.scope", [(first, b""), *later]))


def test_a_log_without_latents_is_refused(recording: Path, tmp_path: Path) -> None:
    def without(record: Record, blob: bytes) -> tuple[Record, bytes]:
        if isinstance(record, Finished):
            return replace(record, latents=None), b""
        return record, blob

    with pytest.raises(UserInputError, match="holds no latents to compare with; replay one that"):
        replay(changed(recording, tmp_path / "b.scope", without))


def test_a_recording_whose_latents_found_no_room_is_replayed_up_to_there(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full_from_4(record: Record, blob: bytes) -> tuple[Record, bytes]:
        if isinstance(record, Finished) and record.chunk_index >= 4:
            return replace(record, latents=None), b""
        return record, blob

    assert replay(changed(recording, tmp_path / "b.scope", full_from_4)) == 0
    said = capsys.readouterr().out
    assert "compared   4 chunks" in said
    rest = f"{NUM_CHUNKS - 4} chunks"
    assert f"left out   {rest} that were made: the recording has not all latents" in said
    assert said.endswith(f"result     equal, as far as compared: {rest} more were made\n")


def test_only_fp32_is_compared_across_tp_degrees(recording: Path, tmp_path: Path) -> None:
    def halves(record: Record, blob: bytes) -> tuple[Record, bytes]:
        if isinstance(record, Opened):
            return replace(record, dtype=DType.BFLOAT16), blob
        return record, blob

    path = changed(recording, tmp_path / "b.scope", halves)
    with pytest.raises(UserInputError, match="replay it with --tp 1"):
        replay(path, "--plan", "pp0", "--tp", "2")


@pytest.mark.parametrize(
    ("plan", "tolerance"), [(("pp1", "1"), 0.0), (("tp_v1_1", "2"), TP_CONTRACT)]
)
def test_another_plan_gives_equal_bits_and_another_degree_1e_4(
    recording: Path, plan: tuple[str, str], tolerance: float
) -> None:
    command = [sys.executable, "-m", "scope_runners.replay", str(recording), "--json"]
    command += ["--plan", plan[0], "--tp", plan[1]]
    done = warm_python.run(command, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    read = json.loads(done.stdout)
    assert read["replayed_as"] == f"{plan[0]} tp {plan[1]}"
    assert (read["passed"], read["compared"], read["tolerance"]) == (True, NUM_CHUNKS, tolerance)
    assert (read["largest_diff"] > 0) == (tolerance > 0)
    assert read["largest_diff"] <= tolerance
