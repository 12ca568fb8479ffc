"""A recording has every frame in order, plays after a kill, and never costs the stream a frame."""

import json
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from scope_contracts.errors import UserInputError
from scope_contracts.retraction import Retraction
from scope_runners.serve.media.frame import PlayedFrame
from scope_runners.serve.media.hub import MOST_RECORDINGS, MediaHub
from scope_runners.serve.media.recording import MOST_WAITING, Recording, recording_file
from tests.serve.media.shown_hub import FPS, RED, played
from tests.serve.running_server import until

BOUND_S = 60.0
_NUM_BITS = 10


class Recorded:
    """A hub that is shown numbered frames, as fast as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told, self.num_shown = folder, list[dict[str, Any]](), 0
        self.hub = MediaHub(
            fps=Fraction(FPS), width=64, height=64, folder=folder, max_viewers=1, tell=self._tell
        )

    def _tell(self, kind: str, **data: Any) -> int:
        self.told.append({"type": kind, **data})
        return len(self.told)

    def show(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self.hub.show(numbered(self.num_shown))
            self.num_shown += 1

    def end_of(self, name: str) -> dict[str, Any]:
        """What was told of its end."""

        def look() -> dict[str, Any] | None:
            ends = [each for each in self.told if each["state"] != "recording"]
            return next((each for each in ends if each["name"] == name), None)

        end = until(look, what=f"the end of {name}", within_s=BOUND_S)
        assert isinstance(end, dict)
        return end

    def written(self, name: str) -> int:
        """How many frames of a recording; -1 once it has ended."""
        recording = self.hub._recordings.get(name)
        return -1 if recording is None else recording.num_frames

    def numbers_in(self, name: str) -> list[int]:
        return numbers_in(self.folder / f"{name}.mp4")


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    recorded = Recorded(tmp_path / "recordings")
    try:
        yield recorded
    finally:
        recorded.hub.close()


def test_recordings_have_what_was_shown_from_start_to_stop_frame_for_frame(
    recorded: Recorded,
) -> None:
    recorded.show(3)
    recorded.hub.start_recording("first")
    recorded.show(20)
    recorded.hub.start_recording("second")
    recorded.show(30)
    recorded.hub.stop_recording("first")
    recorded.show(10)
    assert recorded.hub.recording == "second"
    recorded.hub.stop_recording("")
    assert recorded.end_of("first")["num_frames"] == 50
    assert recorded.end_of("second")["state"] == "finished"
    assert recorded.numbers_in("first") == list(range(3, 53))
    assert recorded.numbers_in("second") == list(range(23, 63))
    listed = recorded.hub.recordings()
    assert {each["name"]: each["under_way"] for each in listed} == {"first": False, "second": False}


def test_a_recording_plays_at_the_frame_rate_of_the_stream(recorded: Recorded) -> None:
    recorded.hub.start_recording("timed")
    recorded.show(2 * FPS)
    recorded.hub.stop_recording("timed")
    recorded.end_of("timed")
    with av.open(str(recorded.folder / "timed.mp4")) as container:
        times_s = [each.time for each in container.decode(video=0)]
    assert times_s == pytest.approx([number / FPS for number in range(2 * FPS)], abs=1e-3)


def test_what_a_killed_process_leaves_plays_up_to_its_last_second_or_two(
    recorded: Recorded, tmp_path: Path
) -> None:
    name = recorded.hub.start_recording("killed")
    recorded.show(6 * FPS)
    path, left = recorded.folder / f"{name}.mp4", tmp_path / "left.mp4"
    until(lambda: recorded.written(name) == 6 * FPS, what="all frames at the muxer")
    for num_lost in (0, 1, 500):
        left.write_bytes(path.read_bytes()[: -num_lost or None])
        numbers = numbers_in(left, is_cut=True)
        assert len(numbers) >= 4 * FPS
        assert numbers == list(range(len(numbers)))


def test_a_disk_that_stalls_ends_the_recording_and_holds_up_no_frame(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, write = threading.Event(), Recording._write

    def stalled(self: Recording, frame: PlayedFrame) -> None:
        assert goes_on.wait(BOUND_S)
        write(self, frame)

    monkeypatch.setattr(Recording, "_write", stalled)
    recorded.hub.start_recording("stalled")
    recorded.show(MOST_WAITING + 10)  # returns while nothing is written
    assert recorded.num_shown == MOST_WAITING + 10
    goes_on.set()
    end = recorded.end_of("stalled")
    assert end["state"] == "failed"
    assert "frames behind" in end["detail"]
    numbers = recorded.numbers_in("stalled")
    assert numbers == list(range(len(numbers)))


def test_a_full_disk_ends_the_recording_with_what_to_do_and_leaves_what_fitted(
    recorded: Recorded,
) -> None:
    recorded.hub.start_recording("cut-short")
    with largest_file(100_000):
        while recorded.written("cut-short") >= 0:
            recorded.show(FPS)
            until(
                lambda: recorded.written("cut-short") in (recorded.num_shown, -1), what="a second"
            )
        end = recorded.end_of("cut-short")
    assert end["state"] == "failed"
    assert "cannot be written" in end["detail"]
    numbers = numbers_in(recorded.folder / "cut-short.mp4", is_cut=True)
    assert numbers
    assert numbers == list(range(len(numbers)))
    recorded.hub.start_recording("next")
    recorded.show(1)
    recorded.hub.stop_recording("next")
    assert recorded.end_of("next")["state"] == "finished"


def test_a_bug_ends_the_recording_and_does_not_let_it_run_on_unwritten(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Recording, frame: PlayedFrame) -> None:
        raise ZeroDivisionError("by a bug")

    monkeypatch.setattr(Recording, "_write", broken)
    recorded.hub.start_recording("broken")
    recorded.show(1)
    end = recorded.end_of("broken")
    assert (end["state"], recorded.hub.recording) == ("failed", None)
    assert "ZeroDivisionError: by a bug" in end["detail"]


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "a" * 65, "a b", "null\0", "a.mp4"])
def test_a_name_that_could_be_a_path_is_refused_by_sentence(recorded: Recorded, name: str) -> None:
    with pytest.raises(UserInputError, match="letters, digits"):
        recorded.hub.start_recording(name)
    assert recording_file(recorded.folder, name) is None


def test_a_recording_is_never_written_over_and_no_more_run_than_may(recorded: Recorded) -> None:
    for number in range(MOST_RECORDINGS):
        recorded.hub.start_recording(f"take-{number}")
    with pytest.raises(UserInputError, match="stop one first"):
        recorded.hub.start_recording("one-more")
    recorded.hub.stop_recording("take-0")
    recorded.end_of("take-0")
    with pytest.raises(UserInputError, match="there already"):
        recorded.hub.start_recording("take-0")
    with pytest.raises(UserInputError, match="start one first"):
        recorded.hub.stop_recording("take-0")


def test_retracted_chunks_are_noted_beside_each_recording_that_has_them_ended_or_not(
    recorded: Recorded,
) -> None:
    recorded.hub.start_recording("before")
    recorded.show(12)
    recorded.hub.stop_recording("before")
    recorded.end_of("before")
    recorded.hub.start_recording("ended")
    recorded.show(24)
    recorded.hub.stop_recording("ended")
    recorded.end_of("ended")
    recorded.hub.start_recording("running")
    recorded.show(12)
    recorded.hub.retracted(
        Retraction(first_chunk=2, last_chunk=3, first_epoch=0, last_epoch=0, reason="parity")
    )
    noted = {"retracted": [{"first_chunk": 2, "last_chunk": 3, "reason": "parity"}]}
    for name in ("ended", "running"):
        assert json.loads((recorded.folder / f"{name}.json").read_text()) == noted
    assert not (recorded.folder / "before.json").exists()


def numbered(number: int) -> PlayedFrame:
    """A picture whose stripes are the bits of its number, over noise that no codec keeps small."""
    noise = np.random.default_rng(number).integers(0, 60, (64, 64, 3), np.uint8)
    for bit in range(_NUM_BITS):
        noise[:, bit * 6 : bit * 6 + 6] += 180 * (number >> bit & 1)
    return replace(played(RED, number), frame_HWC=noise)


def numbers_in(path: Path, *, is_cut: bool = False) -> list[int]:
    """Of the frames of a video; of one that was cut, up to the packet that is not whole."""
    pictures = []
    with av.open(str(path)) as container:
        try:
            for each in container.decode(video=0):
                pictures.append(each.to_ndarray(format="rgb24"))
        except av.error.InvalidDataError:
            assert is_cut, path
    numbers = []
    for picture in pictures:
        scale = picture.shape[1] // 64
        stripes = picture[:, : _NUM_BITS * 6 * scale].reshape(len(picture), _NUM_BITS, -1)
        bits = stripes.mean((0, 2)) > 120
        numbers.append(sum(1 << bit for bit in range(_NUM_BITS) if bits[bit]))
    return numbers


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """As on a full disk: a file of this process can get no larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler: Callable[..., Any] | int | None = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
