"""A rewound stream is the one that was asked for up to there, with its cache rebuilt there."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.steering import Steering
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.record.reader import read_history
from scope_rt.session import StreamSession
from scope_runners.replay import main as replay
from tests.tiny_folder import KREA_RECIPE, RECIPE, write_tiny_folder

NUM_CHUNKS = 10
SOFT = TransitionSpec(num_chunks=4, method=Interpolation.SLERP, bias_floor=0.3)
ASKED = (
    ScheduledEvent(chunk_index=1, seed=99),
    ScheduledEvent(chunk_index=2, prompt="a blue square", transition=SOFT),
    ScheduledEvent(chunk_index=4, bias=0.6),
    ScheduledEvent(chunk_index=6, prompt="a white triangle", hard_cut=True),
)


@pytest.fixture(scope="module", params=["clean_pass", "recompute", "sinks"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    recipes = {
        "clean_pass": RECIPE,
        "recompute": KREA_RECIPE,
        "sinks": replace(RECIPE, sink_frames=4, window_frames=10),
    }
    return write_tiny_folder(path, recipes[request.param])


def config(folder: Path, place: Path, **settings: object) -> StreamConfig:
    files = {"log": place / "log.scope", "snapshot": place / "snapshot", "record_latents": True}
    return StreamConfig.of(folder, **({"seed": 5} | files | settings))


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole stream with its log and snapshot; tests copy it."""
    place = tmp_path_factory.mktemp("made")
    with StreamSession(config(folder, place)) as session:
        for chunk in session.stream("a red circle", num_chunks=NUM_CHUNKS):
            for event in ASKED:
                if event.chunk_index == chunk.chunk_index + 1:
                    session.steer(_steering(event))
    return place


def _steering(event: ScheduledEvent) -> Steering:
    return Steering(
        prompt=event.prompt,
        transition=event.transition,
        hard_cut=event.hard_cut,
        bias=event.bias,
        seed=event.seed,
        command_id=f"c{event.chunk_index}",
    )


def straight(folder: Path, *, rebuilt_at: int, num_chunks: int) -> list[Chunk]:
    """The stream in which only what was asked for before `rebuilt_at` was asked for."""
    history_events = [event for event in ASKED if event.chunk_index < rebuilt_at]
    events = [*history_events, ScheduledEvent(chunk_index=rebuilt_at, recompute=True)]
    with StreamSession(StreamConfig.of(folder, seed=5)) as session:
        return list(session.stream("a red circle", num_chunks=num_chunks, schedule=events))


def test_the_stream_took_what_was_asked_for_where_the_tests_say(made: Path) -> None:
    controls = read_history(made / "log.scope").controls
    taken = {name: each.chunk_index for each in controls for name in each.command_ids}
    assert taken == {"c1": 1, "c2": 2, "c4": 4, "c6": 6}


@pytest.mark.parametrize(
    "chunk_index",
    [3, 6, NUM_CHUNKS, *(pytest.param(other, marks=pytest.mark.lab) for other in (1, 5, 8))],
)
def test_a_rewound_stream_is_one_of_which_nothing_later_was_asked(
    folder: Path, made: Path, tmp_path: Path, chunk_index: int
) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    with StreamSession(config(folder, tmp_path), rewind_to=chunk_index) as session:
        assert session.resumed_at_chunk == chunk_index
        assert set(session.applied) == {f"c{i}" for i in (1, 2, 4, 6) if i < chunk_index}
        again = list(session.stream("none", num_chunks=chunk_index + 3))
    want = straight(folder, rebuilt_at=chunk_index, num_chunks=chunk_index + 3)[chunk_index:]
    assert _made(again) == _made(want)
    assert (again[0].frames == want[0].frames).all(), "the decoder was rebuilt too"
    history = read_history(tmp_path / "log.scope")
    assert list(history.finished) == list(range(chunk_index + 3))
    assert replay([str(tmp_path / "log.scope"), "--model", str(folder)]) == 0


def _made(chunks: Sequence[Chunk]) -> list[tuple[int, int, str, str]]:
    return [(c.chunk_index, c.cache_epoch, c.prompt, c.latents_sha256) for c in chunks]


def test_a_stream_is_rewound_to_its_very_beginning(
    folder: Path, made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    first = read_history(made / "log.scope").finished[0]
    with StreamSession(config(folder, tmp_path), rewind_to=0) as session:
        again = list(session.stream("none", num_chunks=2))
    assert [chunk.chunk_index for chunk in again] == [0, 1]
    assert again[0].latents_sha256 == first.latents_sha256


def test_a_stream_that_is_lost_after_it_was_rewound_resumes_from_there(
    folder: Path, made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    session = StreamSession(config(folder, tmp_path), rewind_to=4)
    stream = session.stream("none", num_chunks=8)
    shown = [next(stream), next(stream)]
    session.log.close()  # as a killed process leaves it
    with StreamSession(config(folder, tmp_path, resume=True)) as session:
        shown = shown[:1] + list(session.stream("none", num_chunks=8))
    assert [chunk.chunk_index for chunk in shown] == [4, 5, 6, 7]


def test_a_fork_continues_a_copy_of_the_log_and_leaves_the_stream_alone(
    folder: Path, made: Path, tmp_path: Path
) -> None:
    shutil.copy(made / "log.scope", tmp_path / "log.scope")
    before = (made / "log.scope").read_bytes()
    with StreamSession(config(folder, tmp_path), rewind_to=7) as session:
        session.steer(Steering(prompt="a green circle"))
        again = list(session.stream("none", num_chunks=9))
    assert [chunk.prompt for chunk in again] == ["a green circle"] * 2
    assert (made / "log.scope").read_bytes() == before


@pytest.mark.parametrize(
    ("chunk_index", "sentence"),
    [
        (NUM_CHUNKS + 1, f"chunk {NUM_CHUNKS + 1} is none of this stream, which has chunks 0 to 9"),
        (-1, "chunk -1 is none of this stream"),
    ],
)
def test_a_chunk_that_is_not_in_the_log_is_refused_by_name(
    folder: Path, made: Path, tmp_path: Path, chunk_index: int, sentence: str
) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "log.scope").read_bytes()
    with pytest.raises(UserInputError, match=sentence):
        StreamSession(config(folder, tmp_path), rewind_to=chunk_index)
    assert (tmp_path / "log.scope").read_bytes() == before


def test_a_log_without_latents_or_without_a_snapshot_is_not_rewound(
    folder: Path, tmp_path: Path
) -> None:
    settings = config(folder, tmp_path, record_latents=False)
    with StreamSession(settings) as session:
        list(session.stream("a red circle", num_chunks=3))
    with pytest.raises(UserInputError, match=r"has no latents of chunk 1.*record_latents"):
        StreamSession(settings, rewind_to=2)
    with pytest.raises(UserInputError, match="keeps a log and a snapshot"):
        StreamSession(StreamConfig.of(folder), rewind_to=2)
