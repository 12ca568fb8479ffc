"""An hour's soak in half a minute: its launcher is killed too, and every check of it can fail."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scope_lab.main import main as lab
from scope_lab.soak import memory, run
from scope_lab.soak.event_log import EventLog, Shown
from scope_lab.soak.fault_injector import FaultInjector
from scope_lab.soak.job import SoakJob
from scope_lab.soak.report import SoakReport, report, table
from scope_lab.soak.schedule import FaultKind
from tests.tiny_folder import write_tiny_folder

Plain = dict[str, Any]

pytestmark = [pytest.mark.timeout(400), pytest.mark.lab]


def soak(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scope_lab.main", "soak", "--out", str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def num_shown(folder: Path) -> int:
    return sum(isinstance(line, Shown) for line in EventLog(folder / "events.jsonl").read().new())


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plain]:
    """The folder of a soak that was killed and resumed, and its report."""
    model = write_tiny_folder(tmp_path_factory.mktemp("model"))
    folder = tmp_path_factory.mktemp("soak") / "run"
    arguments = ["--model", str(model), "--minutes", "0.4", "--plan", "pp1", "--tp", "1"]
    arguments += ["--fault-every", "6", "--cue-every", "3", "--seed", "564"]
    first = soak(folder, *arguments)
    deadline_s = time.monotonic() + 90
    while num_shown(folder) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.2)
    first.kill()
    first.communicate(timeout=30)
    second = soak(folder, "--resume", "--json")
    said, _ = second.communicate(timeout=240)
    assert second.returncode == 0, said
    outcome: Plain = json.loads(said)
    return folder, outcome


def test_a_stream_loses_nothing_while_its_ranks_and_its_launcher_die(
    soaked: tuple[Path, Plain],
) -> None:
    _, outcome = soaked
    assert outcome["passed"]
    assert outcome["chunks_shown"] == outcome["chunks_replayed"] == 32
    assert {figures["kind"] for figures in outcome["faults"]} == {FaultKind.RAISE, FaultKind.STOP}
    assert outcome["attempts"] >= 3
    assert outcome["cues_seen"] == outcome["cues_asked"] == 8
    assert outcome["epochs"] == 3


def judged(soaked: tuple[Path, Plain], folder: Path, edit: Callable[[list[Plain]], None]) -> str:
    """The complaints about a copy of the soak whose event log was edited."""
    shutil.copytree(soaked[0], folder)
    event_log = folder / "events.jsonl"
    lines = [json.loads(line) for line in event_log.read_text().splitlines()]
    edit(lines)
    event_log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "; ".join(verdict(folder).complaints)


def verdict(
    folder: Path, *, left_behind: tuple[int, ...] = (), differs: bool = False
) -> SoakReport:
    job = SoakJob.load(folder)
    replayed: Plain = {"passed": True, "compared": job.num_chunks, "largest_diff": 0.0}
    if differs:
        replayed |= {"passed": False, "differences": [{"chunk_index": 4}]}
    return report(job, code=0, left_behind=left_behind, replayed=replayed)


def nth(lines: list[Plain], kind: str, number: int) -> Plain:
    return [line for line in lines if line["kind"] == kind][number]


def lose_a_chunk(lines: list[Plain]) -> None:
    lines.remove(nth(lines, "Shown", -2))


def show_a_chunk_twice(lines: list[Plain]) -> None:
    lines.append(nth(lines, "Shown", -1))


def show_other_latents(lines: list[Plain]) -> None:
    nth(lines, "Shown", -3)["latents_sha256"] = "0" * 64


def show_other_pictures(lines: list[Plain]) -> None:
    shown = nth(lines, "Shown", -3)
    shown["thumbnail"] = bytes(255 - value for value in bytes.fromhex(shown["thumbnail"])).hex()


def forget_the_faults(lines: list[Plain]) -> None:
    lines[:] = [line for line in lines if line["kind"] != "FaultInjected"]


def leave_out_memory(lines: list[Plain]) -> None:
    lines[:] = [line for line in lines if line["kind"] != "MemorySampled"]


def forget_a_cue(lines: list[Plain]) -> None:
    lines.remove(nth(lines, "CueShown", 2))


def take_long(lines: list[Plain]) -> None:
    last = nth(lines, "Opened", -1)["attempt"]
    for line in lines:
        line["at_s"] += 20.0 * (line["attempt"] == last)


def notice_late(lines: list[Plain]) -> None:
    last = nth(lines, "FaultInjected", -1)["attempt"]
    for line in lines:
        line["at_s"] += 3.0 * (line["attempt"] == last and line["kind"] in ("Failed", "Ended"))


def never_go_on(lines: list[Plain]) -> None:
    last = nth(lines, "Opened", -1)["attempt"]
    lines[:] = [line for line in lines if line["attempt"] != last]


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lose_a_chunk, "31 chunks were shown, 32 were wanted"),
        (show_a_chunk_twice, "33 chunks were shown, 32 were wanted"),
        (show_other_latents, "shown and recorded differ in chunks"),
        (show_other_pictures, "the video shows something else at chunks"),
        (forget_the_faults, "ended without a fault"),
        (forget_the_faults, "(stop of rank 1) did not happen"),
        (leave_out_memory, "no process was seen for long enough to tell whether it grows"),
        (forget_a_cue, "was never seen"),
        (take_long, "s to its first chunk"),
        (notice_late, "was noticed after"),
        (never_go_on, "no chunk came after it"),
    ],
)
def test_every_check_can_fail(
    soaked: tuple[Path, Plain],
    tmp_path: Path,
    edit: Callable[[list[Plain]], None],
    complaint: str,
) -> None:
    assert complaint in judged(soaked, tmp_path / "edited", edit)


def weigh_no_rank(lines: list[Plain]) -> None:
    lines[:] = [line for line in lines if line["kind"] != "MemorySampled" or line["rank"] < 0]


def test_memory_is_not_called_flat_for_ranks_that_nobody_has_weighed(
    soaked: tuple[Path, Plain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judged(soaked, tmp_path / "short", weigh_no_rank) == ""
    said = table(verdict(tmp_path / "short")).splitlines()[-1]
    assert said.endswith(", no rank lived long enough to tell")
    monkeypatch.setattr(memory, "LONG_S", 0.0)
    assert "no rank was seen for long enough" in judged(soaked, tmp_path / "long", weigh_no_rank)


def test_a_recording_that_lacks_its_end_is_a_complaint(
    soaked: tuple[Path, Plain], tmp_path: Path
) -> None:
    folder = shutil.copytree(soaked[0], tmp_path / "run")
    recording = folder / "stream.scope"
    os.truncate(recording, recording.stat().st_size - 1)
    assert "the recording has no end" in verdict(folder).complaints


def test_what_is_left_behind_and_what_a_replay_finds_are_complaints(
    soaked: tuple[Path, Plain],
) -> None:
    assert verdict(soaked[0]).passed
    assert verdict(soaked[0], left_behind=(4711,)).complaints == (
        "processes [4711] were left behind",
    )
    assert "the replay differs" in verdict(soaked[0], differs=True).complaints[0]


def test_a_fault_from_inside_that_never_came_is_a_complaint(
    soaked: tuple[Path, Plain], tmp_path: Path
) -> None:
    folder = shutil.copytree(soaked[0], tmp_path / "run")
    for log in folder.glob("faults.*.jsonl"):
        log.write_text("")
    assert any("(exception of rank" in said for said in untried_in(verdict(folder)))


def untried_in(outcome: SoakReport) -> list[str]:
    return [said for said in outcome.complaints if said.endswith("did not happen")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_chaos_that_ends_before_the_soak_does_is_a_complaint(
    soaked: tuple[Path, Plain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(soaked[0], tmp_path / "run")

    def fail(threshold: float) -> bool:
        raise RuntimeError("the injector has failed")

    injector = FaultInjector(SoakJob.load(folder), [], first_attempt=0)
    monkeypatch.setattr(injector, "_inject", fail)
    injector.start()
    deadline_s = time.monotonic() + 60
    while is_alive("fault-injector") and time.monotonic() < deadline_s:
        time.sleep(0.05)
    injector.close()
    assert "the fault injector ended before the soak did" in verdict(folder).complaints


def is_alive(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def test_a_soak_that_still_runs_is_not_gone_on_with(
    soaked: tuple[Path, Plain], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(soaked[0], tmp_path / "run")
    with SoakJob.load(folder).claim():
        assert lab(["soak", "--resume", "--out", str(folder)]) == 2
    assert capsys.readouterr().err == (
        f"soak: the soak in {folder} still runs; wait for its end, or end it first\n"
    )


def test_a_rank_that_ends_while_it_is_swept_up_is_no_error(
    soaked: tuple[Path, Plain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    monkeypatch.setattr(run, "_processes_of", lambda folder, within_s: [nobody])
    monkeypatch.setenv("SOAK_FOLDER", "")  # which the soak sets
    monkeypatch.setattr(run, "_soak", lambda job: 130)
    folder = shutil.copytree(soaked[0], tmp_path / "run")
    assert lab(["soak", "--resume", "--out", str(folder)]) == 130
