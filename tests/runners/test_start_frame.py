"""`scope-rt stream --image`: a picture begins the video, outlives a loss, and is recorded."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scope_rt.config import StreamConfig
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.start_frame import StartFrame
from scope_rt.faults import FaultPoint
from scope_rt.record.reader import read_progress
from scope_rt.session import StreamSession
from scope_runners import replay
from scope_runners.break_it import stream as broken
from scope_runners.break_it.faults import Fault
from scope_runners.exit_codes import RETRACTED
from scope_runners.main import main
from scope_runners.recording_argument import Recording
from tests.runners.streams import PP1, lose_the_link_after, set_faults
from tests.tiny_folder import FRAMEWISE_RECIPE, tiny_folder, write_tiny_folder

NUM_CHUNKS = 6
PROMPT = "a red circle"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("framewise"), FRAMEWISE_RECIPE)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "start.png"
    edit(path, seed=0)
    return path


def edit(path: Path, *, seed: int = 1) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


@contextmanager
def once_begun(log: Path, call: Callable[[], None]) -> Iterator[None]:
    """Make the call while a stream runs, as soon as its log has the start frame."""

    def watch() -> None:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and read_progress(log).start_frame is None:
            time.sleep(0.001)
        call()
        changed.set()

    changed, watcher = Event(), Thread(target=watch)
    watcher.start()
    try:
        yield
        assert changed.is_set()
    finally:
        watcher.join()


def asked(model: Path, place: Path, *arguments: str) -> list[str]:
    """A stream of `NUM_CHUNKS` chunks of 4 frames."""
    seconds = str(NUM_CHUNKS * 4 / FRAMEWISE_RECIPE.fps)
    request = ["--model", str(model), "--prompt", PROMPT, "--seed", "7", "--seconds", seconds]
    return [*request, "--out", str(place / "a.mp4"), *arguments]


def summary(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    told = json.loads(capfd.readouterr().out)
    assert isinstance(told, dict)
    return told


def digests(model: Path, picture: Path, *events: ScheduledEvent) -> list[str]:
    """Of the same stream, in this process."""
    with StreamSession(StreamConfig.of(model, seed=7, image=picture)) as session:
        chunks = session.stream(PROMPT, num_chunks=NUM_CHUNKS, schedule=events)
        return [chunk.latents_sha256 for chunk in chunks]


def latents_of(told: dict[str, Any]) -> list[str]:
    return [chunk["latents_sha256"] for chunk in told["chunks"]]


def test_it_is_in_the_video_the_summary_and_the_recording(
    model: Path, picture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "a.scope"
    files = ["--image", str(picture), "--record", str(record)]
    assert main(["stream", *asked(model, tmp_path, *files, "--json")]) == 0
    told = summary(capfd)
    assert told["image"] == str(picture)
    assert latents_of(told) == digests(model, picture)
    picture.unlink()
    assert main(["inspect", str(record)]) == 0
    assert f"start frame: {picture} (SHA-256 " in capfd.readouterr().out
    assert main(["inspect", str(record), "--json"]) == 0
    assert summary(capfd)["start_frame"]["image"] == str(picture)
    again = tmp_path / "again.scope"
    assert main(["replay", str(record), "--record", str(again)]) == 0
    assert main(["replay", str(again), "--plan", "pp1"]) == 0
    capfd.readouterr()
    assert main(["replay", str(record), "--plan", "tp_v1_1", "--tp", "2", "--json"]) == 0
    report = summary(capfd)
    assert report["compared"] == NUM_CHUNKS
    assert 0 < report["largest_diff"] <= 1e-4


@pytest.mark.parametrize("name", ["a.png", "link.png"])
def test_a_stream_does_not_replace_the_picture_it_begins_with(
    model: Path, picture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """The contact sheet of `a.mp4` is `a.png`."""
    data = picture.read_bytes()
    (tmp_path / "a.png").write_bytes(data)
    if name != "a.png":
        (tmp_path / name).symlink_to(tmp_path / "a.png")
    image = tmp_path / name
    assert main(["stream", *asked(model, tmp_path, "--image", str(image))]) == 2
    want = f"scope-rt: image {image} is where a file beside --out {tmp_path / 'a.mp4'} goes; "
    assert capfd.readouterr().err == f"{want}choose another --out\n"
    assert image.read_bytes() == data


def test_a_replay_that_begins_with_another_picture_differs(
    model: Path,
    picture: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = tmp_path / "a.scope"
    files = ["--image", str(picture), "--record", str(record)]
    assert main(["stream", *asked(model, tmp_path, *files)]) == 0
    recorded = replay._start_frame

    def darker(recording: Recording) -> StartFrame | None:
        frame = recorded(recording)
        assert frame is not None
        return replace(frame, latents=frame.latents / 2, latents_sha256="")

    monkeypatch.setattr(replay, "_start_frame", darker)
    capfd.readouterr()
    assert main(["replay", str(record), "--json"]) == 1
    differences = summary(capfd)["differences"]
    assert [each["chunk_index"] for each in differences] == [*range(NUM_CHUNKS)]


@pytest.mark.parametrize("arguments", [PP1, ["--plan", "tp_v1_1", "--tp", "2", "--oversubscribe"]])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("chunk", [0, 1])
def test_a_rank_that_is_killed_at_the_picture_or_after_it_changes_nothing_but_the_rebuild(
    model: Path,
    picture: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: Sequence[str],
    rank: int,
    chunk: int,
) -> None:
    point = FaultPoint.CALL if rank or "pp1" not in arguments else FaultPoint.COLLECTED
    set_faults(monkeypatch, Fault(action="kill", rank=rank, point=point, chunk=chunk))
    request = asked(model, tmp_path, "--image", str(picture), *arguments, "--json")
    rebuilt = [ScheduledEvent(chunk_index=chunk, recompute=True)] * (chunk > 0)
    want = digests(model, picture, *rebuilt)
    with once_begun(tmp_path / ".a.mp4.log", picture.unlink if rank else partial(edit, picture)):
        assert broken.main(request) == 0
    told = summary(capfd)
    assert told["totals"]["restarts"] == 1
    if "pp1" in arguments:
        assert latents_of(told) == want
    else:
        assert latents_of(told)[0] == want[0], "sums of another degree move the others"
    assert len(told["chunks"]) == NUM_CHUNKS


def test_a_picture_that_is_retracted_is_shown_again_in_the_next_epoch(
    model: Path,
    picture: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCOPE_VERIFY_WITHIN", str(NUM_CHUNKS))
    start, *_ = digests(model, picture)
    altered = Fault(action="alter_weight", rank=1, point=FaultPoint.GENERATOR, chunk=1)
    set_faults(monkeypatch, altered)
    request = asked(model, tmp_path, "--image", str(picture), *PP1, "--json")
    with once_begun(tmp_path / ".a.mp4.log", picture.unlink):
        assert broken.main(request) == RETRACTED
    told = summary(capfd)
    assert told["retractions"][0]["first_chunk"] == 0
    assert [chunk["cache_epoch"] for chunk in told["chunks"]] == [1] * NUM_CHUNKS
    assert [chunk["generator_calls"] for chunk in told["chunks"]] == [1, 4, 3, 3, 3, 3]
    assert latents_of(told)[0] == start


def test_a_stream_is_resumed_as_one_with_its_picture_though_that_is_gone(
    model: Path, picture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    request = asked(model, tmp_path)
    with_picture = [*request, "--image", str(picture)]
    want = digests(model, picture, ScheduledEvent(chunk_index=1, recompute=True))
    lose_the_link_after(1, out, *with_picture)
    picture.unlink()
    capfd.readouterr()
    assert main(["stream", *request, "--resume"]) == 2
    said = capfd.readouterr().err
    assert f"of a stream with image {picture}, this one has none; use that one again" in said
    assert main(["stream", *with_picture, "--resume", "--json"]) == 0
    assert latents_of(summary(capfd)) == want


def test_it_is_a_setting_too(
    model: Path, picture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stream.toml"
    file.write_text(f'[sampling]\nimage = "{picture}"\n')
    assert main(["stream", *asked(model, tmp_path, "--config", str(file), "--json")]) == 0
    assert latents_of(summary(capfd)) == digests(model, picture)


def test_a_picture_that_cannot_be_used_is_refused_before_a_rank_starts(
    model: Path, picture: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    picture.write_bytes(picture.read_bytes()[:200])
    place = tmp_path / "out"
    request = asked(model, place, "--image", str(picture), *PP1)
    assert main(["stream", *request]) == 2
    said = capfd.readouterr().err
    assert f"image {picture}: is cut short or damaged" in said
    assert len(said.splitlines()) == 1
    assert not place.exists()
    other = ["--model", str(tiny_folder()), "--prompt", PROMPT, "--image", str(picture)]
    assert main(["stream", *other]) == 2
    assert "begins with noise, 3 latent frames at a time" in capfd.readouterr().err
