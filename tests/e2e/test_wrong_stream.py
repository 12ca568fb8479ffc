"""What was computed wrong is neither kept unknowingly nor built upon, from command to video."""

import json
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np
import pytest

from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Finished
from scope_contracts.retraction import Retraction
from scope_rt.faults import FaultPoint
from scope_rt.integrity.verifier import AUDITED_CHUNKS
from scope_rt.record.reader import StreamHistory, open_log, read_history
from scope_runners.break_it import stream
from scope_runners.break_it.faults import Fault
from scope_runners.exit_codes import INTEGRITY, RETRACTED
from scope_runners.main import main
from tests.runners.streams import num_frames, set_faults
from tests.tiny_folder import tiny_folder

PROMPT, SEED, WITHIN, AT = "a red circle", 7, 3, 6
"""M, and the chunk at which something is changed."""
STREAM = ["--prompt", PROMPT, "--seconds", "7.5", "--seed", str(SEED), "--oversubscribe"]
NUM_CHUNKS, FRAMES_PER_CHUNK, FPS = 10, 12, 16
PP1_TP2 = ["--plan", "pp1", "--tp", "2"]
TP2 = ["--plan", "tp_v1_1", "--tp", "2"]
FLIPPED: dict[str, Any] = {"action": "alter_weight", "point": FaultPoint.GENERATOR}
SPOILED: dict[str, Any] = {"action": "spoil_result", "point": FaultPoint.RESULT}
KILLED: dict[str, Any] = {"action": "kill", "point": FaultPoint.CALL}


class Made:
    """A video made under a launcher, and what is told of it."""

    def __init__(self, code: int, place: Path, said: str) -> None:
        self.code, self.video, self.said = code, place / "a.mp4", said
        self.summary: dict[str, Any] = json.loads((place / "a.json").read_text())
        self._log = place / "a.scope"
        self.history: StreamHistory = read_history(self._log)

    @property
    def latents(self) -> list[tuple[int, int, str]]:
        return latents_of(self.summary)

    @property
    def last_shown_in_epoch_0(self) -> int:
        """The newest chunk that was decoded before the cut, as the log has it."""
        with open_log(self._log) as file:
            records = [entry.record for entry in LogReader(file)]
        return max(
            record.chunk_index
            for record in records
            if isinstance(record, Finished) and record.cache_epoch == 0
        )


def latents_of(summary: dict[str, Any]) -> list[tuple[int, int, str]]:
    """Index, epoch and digest of each chunk of the video."""
    return [(c["chunk_index"], c["cache_epoch"], c["latents_sha256"]) for c in summary["chunks"]]


def make(
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: Sequence[str],
    *faults: Fault,
) -> Made:
    monkeypatch.setenv("SCOPE_VERIFY_WITHIN", str(WITHIN))
    set_faults(monkeypatch, *faults)
    model = ["--model", str(tiny_folder())]
    files = ["--out", str(place / "a.mp4"), "--record", str(place / "a.scope"), "--json"]
    start_s = time.monotonic()
    code = stream.main([*STREAM, *model, *arguments, *files])
    assert time.monotonic() - start_s < 90
    return Made(code, place, capfd.readouterr().err)


def darkest_chunk(video: Path) -> float:
    """The least standard deviation of a picture: a black one has 0."""
    with av.open(str(video)) as container:
        return min(
            float(np.std(frame.to_ndarray(format="rgb24"))) for frame in container.decode(video=0)
        )


@pytest.mark.parametrize(
    ("arguments", "rank", "what"),
    [
        (["--plan", "pp1"], 1, SPOILED),
        pytest.param(["--plan", "pp1"], 1, FLIPPED, marks=pytest.mark.lab),
        (PP1_TP2, 2, FLIPPED),
        pytest.param(TP2, 1, FLIPPED, marks=pytest.mark.lab),
        (TP2, 0, FLIPPED),
        pytest.param(["--plan", "tp_v0", "--tp", "2"], 1, FLIPPED, marks=pytest.mark.lab),
    ],
    ids=[
        "pp1, NaN",
        "pp1, weight",
        "pp1 tp 2, weight of the follower",
        "tp_v1_1, weight",
        "tp_v1_1, weight of rank0",
        "tp_v0, weight",
    ],
)
def test_what_is_found_wrong_is_retracted_and_made_again_after_a_cut(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    rank: int,
    what: dict[str, Any],
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    made = make(broken, capfd, monkeypatch, arguments, Fault(rank=rank, chunk=AT, **what))
    assert made.code == RETRACTED, made.said
    assert made.summary["ending"] == "complete"
    assert made.summary["totals"]["restarts"] == 1
    (told,) = made.summary["retractions"]
    (recorded,) = made.history.retractions
    assert Retraction(**told) == recorded
    assert recorded.first_chunk <= AT
    assert recorded.last_chunk - recorded.first_chunk == WITHIN - 2
    assert made.summary["totals"]["retracted"] == WITHIN - 1
    assert made.summary["totals"]["unverified"] == 0
    if what is FLIPPED:
        assert f"rank {rank}: weight blocks.0.attn1.to_q.weight" in recorded.reason
        assert f"rank {rank}: weight" in made.said
    assert not any(chunk["is_suspect"] for chunk in made.summary["chunks"])
    cut = recorded.first_chunk
    epochs = [epoch for _, epoch, _ in made.latents]
    assert epochs == [0] * cut + [1] * (NUM_CHUNKS - cut)
    assert darkest_chunk(made.video) > 5
    assert num_frames(made.video) == made.summary["totals"]["frames"]
    assert made.latents == clean_with_cut("2" if "--tp" in arguments else "1", cut)


def test_what_a_sample_finds_is_cut_from_the_video_as_far_back_as_it_may_be(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sample after the change is that of the last chunk but one."""
    seconds = (AUDITED_CHUNKS + 2) * FRAMES_PER_CHUNK / FPS
    bent = Fault(
        rank=1, chunk=AUDITED_CHUNKS - 2, action="change_kernel", point=FaultPoint.GENERATOR
    )
    made = make(tmp_path, capfd, monkeypatch, ["--plan", "pp1", "--seconds", str(seconds)], bent)
    assert made.code == RETRACTED, made.said
    (recorded,) = made.history.retractions
    assert (recorded.first_chunk, recorded.last_chunk) == (0, AUDITED_CHUNKS - 1)
    assert "call 1, layer 0" in recorded.reason
    assert made.summary["totals"]["retracted"] == AUDITED_CHUNKS
    assert [epoch for _, epoch, _ in made.latents] == [1] * (AUDITED_CHUNKS + 2)
    assert num_frames(made.video) == made.summary["totals"]["frames"]
    assert not any(chunk["is_suspect"] for chunk in made.summary["chunks"])


@cache
def clean_with_cut(tp: str, cut: int) -> list[tuple[int, int, str]]:
    """The chunks of a stream of this TP degree, which no plan changes, in which a person asks for
    the cut."""
    at_s = cut * FRAMES_PER_CHUNK / FPS
    plan = ["--plan", "single" if tp == "1" else "tp_v0", "--tp", tp]
    with TemporaryDirectory() as place:
        video = Path(place) / "a.mp4"
        out = ["--out", str(video), "--hard-cut-at", f"{at_s}s"]
        assert main(["stream", *STREAM, "--model", str(tiny_folder()), *plan, *out]) == 0
        return latents_of(json.loads(video.with_suffix(".json").read_text()))[:NUM_CHUNKS]


def test_a_killed_rank_is_a_loss_without_a_retraction(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path, capfd, monkeypatch, PP1_TP2, Fault(rank=2, chunk=AT, **KILLED))
    assert made.code == 0, made.said
    assert made.summary["totals"]["restarts"] == 1
    assert made.summary["retractions"] == made.history.retractions == []
    assert {epoch for _, epoch, _ in made.latents} == {0}
    assert any(chunk["recomputed"] for chunk in made.summary["chunks"])
    assert made.summary["totals"]["unverified"] == WITHIN - 1
    said = f"rank 2 was lost before all that it held was verified once more; chunks {AT - 2} to"
    assert said in made.said


@pytest.mark.parametrize(
    ("arguments", "killed", "survivor"),
    [(PP1_TP2, 1, 2), pytest.param(PP1_TP2, 2, 1, marks=pytest.mark.lab), (TP2, 1, 0)],
)
def test_after_a_loss_nothing_is_made_from_what_a_survivor_holds_wrong(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    killed: int,
    survivor: int,
) -> None:
    monkeypatch.setattr("tests.e2e.test_wrong_stream.WITHIN", 64)  # no rotation gets so far
    flipped = Fault(rank=survivor, chunk=AT - 1, **FLIPPED)
    made = make(
        tmp_path, capfd, monkeypatch, arguments, flipped, Fault(rank=killed, chunk=AT, **KILLED)
    )
    assert made.code == RETRACTED, made.said
    (recorded,) = made.history.retractions
    assert f"rank {survivor}: weight blocks.0.attn1.to_q.weight" in recorded.reason
    # Rank0 may learn of the loss as it sends, before the chunk that was made last arrives.
    assert (recorded.first_chunk, recorded.last_chunk) == (0, made.last_shown_in_epoch_0)
    assert made.last_shown_in_epoch_0 >= AT - 2
    assert [epoch for _, epoch, _ in made.latents] == [1] * NUM_CHUNKS


def test_what_a_rank_found_is_retracted_though_rank0_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.e2e.test_wrong_stream.WITHIN", 64)
    flipped = Fault(rank=2, chunk=AT - 2, **FLIPPED)
    killed = Fault(rank=0, chunk=AT, action="kill", point=FaultPoint.COLLECTED)
    made = make(tmp_path, capfd, monkeypatch, PP1_TP2, flipped, killed)
    assert made.code == RETRACTED, made.said
    (recorded,) = made.history.retractions
    assert (recorded.first_chunk, recorded.last_chunk) == (0, AT - 1)
    assert "rank0 was lost" in recorded.reason
    assert [index for index, _, _ in made.latents] == list(range(NUM_CHUNKS))
    assert [epoch for _, epoch, _ in made.latents] == [1] * NUM_CHUNKS
    assert num_frames(made.video) == made.summary["totals"]["frames"]


def test_without_a_restart_what_is_suspect_is_marked_and_a_resume_replaces_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--plan", "pp1", "--max-restarts", "0"]
    fault = Fault(rank=1, chunk=AT, **SPOILED)
    made = make(tmp_path, capfd, monkeypatch, arguments, fault)
    assert made.code == INTEGRITY, made.said
    assert made.summary["ending"] == "failed"
    suspect = [c["chunk_index"] for c in made.summary["chunks"] if c["is_suspect"]]
    assert suspect == [AT - 2, AT - 1]
    assert main(["inspect", str(tmp_path / "a.scope"), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    fates = [line["fate"] for line in told["chunks"]][:AT]
    assert fates == ["shown"] * (AT - 2) + ["retracted"] * 2
    assert told["retractions"] == made.summary["retractions"]
    assert main(["inspect", str(tmp_path / "a.scope")]) == 0
    assert f"retracted chunks {AT - 2} to {AT - 1} of epoch 0: chunk" in capfd.readouterr().out
    resumed = make(tmp_path, capfd, monkeypatch, [*arguments, "--resume"])
    assert resumed.code == RETRACTED, resumed.said
    assert [index for index, _, _ in resumed.latents] == list(range(NUM_CHUNKS))
    assert not any(chunk["is_suspect"] for chunk in resumed.summary["chunks"])
    assert resumed.summary["retractions"] == made.summary["retractions"]
    assert f"chunks {AT - 2} to {AT - 1} of epoch 0" in resumed.said


@pytest.mark.parametrize(
    ("arguments", "rank"),
    [
        (PP1_TP2, 2),
        pytest.param(TP2, 1, marks=pytest.mark.lab),
        pytest.param(TP2, 0, marks=pytest.mark.lab),
    ],
)
def test_what_changes_with_the_last_chunk_is_found_before_the_stream_is_complete(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    rank: int,
) -> None:
    monkeypatch.setattr("tests.e2e.test_wrong_stream.WITHIN", 64)  # no rotation gets so far
    made = make(
        tmp_path, capfd, monkeypatch, arguments, Fault(rank=rank, chunk=NUM_CHUNKS - 1, **FLIPPED)
    )
    assert made.code == RETRACTED, made.said
    (recorded,) = made.history.retractions
    assert (recorded.first_chunk, recorded.last_chunk) == (0, NUM_CHUNKS - 1)
    assert f"rank {rank}: weight blocks.0.attn1.to_q.weight" in recorded.reason
    assert [epoch for _, epoch, _ in made.latents] == [1] * NUM_CHUNKS
