"""An hour's soak in half a minute: its launcher is killed too, and every check of it can fail."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scope_runners.soak.diary import Diary, Shown, Weighed
from scope_runners.soak.job import SoakJob
from scope_runners.soak.memory import LAUNCHER, MOST_GROWTH_BYTES, growths
from scope_runners.soak.report import SoakReport, report
from scope_runners.soak.schedule import FaultKind
from tests.tiny_folder import write_tiny_folder

Plain = dict[str, Any]

pytestmark = pytest.mark.timeout(400)


def soak(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scope_runners.soak.run", "--out", str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def num_shown(folder: Path) -> int:
    return sum(isinstance(line, Shown) for line in Diary(folder / "diary.jsonl").read().new())


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plain]:
    """The folder of a soak that was killed and gone on with, and what it said."""
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
    """The complaints about a copy of the soak whose diary was edited."""
    shutil.copytree(soaked[0], folder)
    diary = folder / "diary.jsonl"
    lines = [json.loads(line) for line in diary.read_text().splitlines()]
    edit(lines)
    diary.write_text("".join(json.dumps(line) + "\n" for line in lines))
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
    lines.remove(nth(lines, "shown", -2))


def show_a_chunk_twice(lines: list[Plain]) -> None:
    lines.append(nth(lines, "shown", -1))


def show_other_latents(lines: list[Plain]) -> None:
    nth(lines, "shown", -3)["latents_sha256"] = "0" * 64


def show_other_pictures(lines: list[Plain]) -> None:
    shown = nth(lines, "shown", -3)
    shown["thumbnail"] = bytes(255 - value for value in bytes.fromhex(shown["thumbnail"])).hex()


def forget_the_faults(lines: list[Plain]) -> None:
    lines[:] = [line for line in lines if line["kind"] != "broken"]


def forget_a_cue(lines: list[Plain]) -> None:
    lines.remove(nth(lines, "seen", 2))


def take_long(lines: list[Plain]) -> None:
    last = nth(lines, "opened", -1)["attempt"]
    for line in lines:
        line["at_s"] += 20.0 * (line["attempt"] == last)


def notice_late(lines: list[Plain]) -> None:
    last = nth(lines, "broken", -1)["attempt"]
    for line in lines:
        line["at_s"] += 3.0 * (line["attempt"] == last and line["kind"] in ("failed", "ended"))


def never_go_on(lines: list[Plain]) -> None:
    last = nth(lines, "opened", -1)["attempt"]
    lines[:] = [line for line in lines if line["attempt"] != last]


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (lose_a_chunk, "31 chunks were shown, 32 were wanted"),
        (show_a_chunk_twice, "33 chunks were shown, 32 were wanted"),
        (show_other_latents, "shown and recorded differ in chunks"),
        (show_other_pictures, "the video shows something else at chunks"),
        (forget_the_faults, "ended without a fault"),
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


def weighed(sizes: list[float]) -> list[Weighed]:
    return [
        Weighed(at_s=5.0 * n, attempt=0, rank=LAUNCHER, rss_bytes=int(size), num_shown=0)
        for n, size in enumerate(sizes)
    ]


def test_a_process_that_grows_is_told_from_one_that_is_noisy() -> None:
    noise = [300e6 + 30e6 * (n % 7 == 0) for n in range(100)]
    leak = [300e6 + 1.5 * MOST_GROWTH_BYTES / 100 * n for n in range(100)]
    assert [growth.is_flat for growth in growths(weighed(noise))] == [True]
    assert [growth.is_flat for growth in growths(weighed(leak))] == [False]
