"""A stream that lost everything but its log and snapshot resumes: no chunk twice, none missing."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import SnapshotError, UserInputError
from scope_contracts.log_records import Opened
from scope_rt import recovery
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.instruments import Instruments
from scope_rt.mesh.loaded import MeshResumePoint
from scope_rt.mesh.rank import Rank
from scope_rt.record.log_disk import resume_log
from scope_rt.record.reader import read_history
from scope_rt.record.snapshot import look
from scope_rt.record.snapshot_folder import SnapshotFolder
from scope_rt.resumed import EarlierStream
from scope_rt.session import StreamSession
from scope_rt.stream_identity import opened
from scope_rt.stream_setup import StreamSetup
from scope_rt.watchdog import Watchdog
from tests.tiny_folder import KREA_RECIPE, write_tiny_folder

NUM_CHUNKS = 9
SOFT = TransitionSpec(num_chunks=4, method=Interpolation.LERP, bias_floor=0.3)
EVENTS = (
    ScheduledEvent(chunk_index=2, prompt="a blue square", transition=SOFT),
    ScheduledEvent(chunk_index=7, prompt="a white triangle", hard_cut=True),
)


@pytest.fixture(scope="module", params=["clean_pass", "recompute"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "recompute":
        return write_tiny_folder(path, KREA_RECIPE)
    return write_tiny_folder(path)


def kept_in(place: Path, folder: Path, **settings: Any) -> StreamConfig:
    """A stream with a log and a snapshot in `place`."""
    given = {"seed": 5, "log": place / "log", "snapshot": place / "snapshot"} | settings
    return StreamConfig.of(folder, **given)


@cache
def whole(folder: Path, *, rebuilt_at: int | None) -> Sequence[Chunk]:
    """The stream that nothing happens to, or that is asked for a rebuild."""
    events = list(EVENTS)
    if rebuilt_at is not None:
        events.append(ScheduledEvent(chunk_index=rebuilt_at, recompute=True))
    with StreamSession(StreamConfig.of(folder, seed=5)) as session:
        return tuple(session.stream("a red circle", num_chunks=NUM_CHUNKS, schedule=events))


def lost_after(
    place: Path, folder: Path, *, num_shown: int, num_acknowledged: int, **settings: Any
) -> list[Chunk]:
    """A stream that ends without a word, its consumer having acknowledged `num_acknowledged`."""
    session = StreamSession(kept_in(place, folder, **settings))
    shown: list[Chunk] = []
    for chunk in session.stream(
        "a red circle",
        num_chunks=NUM_CHUNKS,
        schedule=EVENTS,
        acknowledged=lambda: min(len(shown), num_acknowledged),
    ):
        shown.append(chunk)
        if len(shown) == num_shown:
            break
    session.log.close()
    return shown[:num_acknowledged]


def resumed(place: Path, folder: Path, *, num_acknowledged: int) -> list[Chunk]:
    with StreamSession(kept_in(place, folder, resume=True)) as session:
        return list(
            session.stream("none", num_chunks=NUM_CHUNKS, acknowledged=lambda: num_acknowledged)
        )


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def noting(note: Callable[[], None], call: Callable[..., int]) -> Callable[..., int]:
    def noted(*arguments: Any, **more: Any) -> int:
        note()
        return call(*arguments, **more)

    return noted


def files_of(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def same(got: Sequence[Chunk], want: Sequence[Chunk]) -> bool:
    return len(got) == len(want) and all(
        a.latents_sha256 == b.latents_sha256
        and (a.frames == b.frames).all()
        and a.prompt == b.prompt
        and a.chunk_index == b.chunk_index
        for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize(
    ("num_shown", "num_acknowledged"), [(1, 0), (3, 2), (4, 4), (7, 5), (8, 8)]
)
def test_a_resumed_stream_equals_one_that_rebuilds_its_cache_there(
    folder: Path, tmp_path: Path, num_shown: int, num_acknowledged: int
) -> None:
    kept = lost_after(tmp_path, folder, num_shown=num_shown, num_acknowledged=num_acknowledged)
    stream = kept + resumed(tmp_path, folder, num_acknowledged=num_acknowledged)
    assert same(stream, whole(folder, rebuilt_at=num_shown))
    assert same(stream[:num_shown], whole(folder, rebuilt_at=None)[:num_shown])


def test_a_stream_can_be_lost_again_and_again(folder: Path, tmp_path: Path) -> None:
    stream = lost_after(tmp_path, folder, num_shown=1, num_acknowledged=1)
    while len(stream) < NUM_CHUNKS:
        session = StreamSession(kept_in(tmp_path, folder, resume=True))
        have = len(stream)
        more = session.stream("none", num_chunks=NUM_CHUNKS, acknowledged=lambda: have)  # noqa: B023
        stream.append(next(iter(more)))
        session.log.close()
    assert [chunk.chunk_index for chunk in stream] == list(range(NUM_CHUNKS))
    assert [chunk.cache_epoch for chunk in stream] == [0] * 7 + [1] * 2


def test_a_resumed_session_says_where_it_is_and_what_the_consumer_has(
    folder: Path, tmp_path: Path
) -> None:
    lost_after(tmp_path, folder, num_shown=4, num_acknowledged=2)
    with StreamSession(kept_in(tmp_path, folder, resume=True)) as session:
        assert session.resumed_at_chunk == 4
        assert session.num_acknowledged_before == 2
        assert session.resumed is not None
        assert list(session.resumed.progress.shown) == [(index, 0) for index in range(4)]


def test_the_tail_is_as_long_as_decoder_and_context_need(folder: Path) -> None:
    setup = StreamSetup.of(StreamConfig.of(folder))
    decoder, context = setup.codec_sizes.decoder_context_frames, setup.recipe.context_frames
    assert 0 < decoder <= context
    is_decoded = not setup.recipe.clean_pass
    assert setup.num_tail_frames == (decoder + context if is_decoded else context)


def test_followers_are_sent_no_more_than_rebuilds_them_however_much_is_pending(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[MeshResumePoint] = []

    def start(rank: Rank, point: MeshResumePoint) -> None:
        sent.append(point)
        real_start(rank, point)

    real_start = Rank.start
    lost_after(tmp_path, folder, num_shown=7, num_acknowledged=0)
    monkeypatch.setattr(Rank, "start", start)
    with StreamSession(kept_in(tmp_path, folder, resume=True)) as session:
        num_tail_frames = session.setup.num_tail_frames
        assert session.num_acknowledged_before == 0
    (point,) = sent
    assert point.tail is not None
    assert 3 * len(point.tail.chunks) < num_tail_frames + 3
    assert len(point.tail.chunks) < 7


def test_a_snapshot_holds_none_of_a_long_schedule_and_a_resumed_stream_all_of_it(
    folder: Path, tmp_path: Path
) -> None:
    prompts = ("a blue square", "a white triangle, fast", "a green circle")
    events = [
        ScheduledEvent(
            chunk_index=index,
            prompt=None if index % 5 == 4 else prompts[index % 3],
            transition=SOFT if index % 5 == 2 else None,
            hard_cut=index % 5 == 3,
            recompute=index % 5 == 4,
        )
        for index in range(1, 2000)
    ]
    session = StreamSession(kept_in(tmp_path, folder))
    stream = session.stream("a red circle", schedule=events)
    for _ in range(4):
        next(stream)
    session.log.close()
    (state,) = (tmp_path / "snapshot").glob("state.*")
    assert state.stat().st_size < 10_000
    with StreamSession(kept_in(tmp_path, folder, resume=True)) as again:
        assert again._loop is not None
        kept = again._loop.inbox.scheduled()
    want = [session._scheduled(event) for event in events if event.chunk_index >= 4]
    assert [event.chunk_index for event in kept] == [event.chunk_index for event in want]
    for got, asked in zip(kept, want, strict=True):
        assert got.directive.transition == asked.directive.transition
        assert (got.directive.hard_cut, got.directive.recompute) == (
            asked.directive.hard_cut,
            asked.directive.recompute,
        )
        one, other = got.directive.conditioning, asked.directive.conditioning
        assert (one and one.prompt) == (other and other.prompt)
        assert one is None or other is None or bool((one.embeds == other.embeds).all())


def test_without_a_snapshot_a_session_that_may_resume_starts_anew(
    folder: Path, tmp_path: Path
) -> None:
    with StreamSession(kept_in(tmp_path, folder, resume=True)) as session:
        assert session.resumed_at_chunk is None
        chunks = list(session.stream("a red circle", num_chunks=NUM_CHUNKS, schedule=EVENTS))
    assert same(chunks, whole(folder, rebuilt_at=None))


def test_the_snapshot_tells_how_far_a_stream_is_and_who_ran_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_after(tmp_path, folder, num_shown=4, num_acknowledged=4)
    earlier = look(tmp_path / "snapshot")
    assert earlier is not None
    assert earlier.next_chunk_index == 4
    monkeypatch.setattr(Rank, "run_id", "another")
    lost_after(tmp_path, folder, num_shown=1, num_acknowledged=1, resume=False)
    later = look(tmp_path / "snapshot")
    assert later is not None
    assert (later.run_id, later.next_chunk_index) == ("another", 1)
    assert earlier.run_id != later.run_id


def test_a_session_that_is_refused_leaves_the_snapshot_and_a_new_one_removes_it(
    folder: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshot"
    lost_after(tmp_path, folder, num_shown=1, num_acknowledged=1)
    refused = StreamSession(kept_in(tmp_path, folder, log=tmp_path, resume=False))
    with pytest.raises(UserInputError, match=f"{tmp_path}: "):
        refused.stream("a red circle", num_chunks=1)
    assert look(snapshot) is not None
    with StreamSession(kept_in(tmp_path, folder, resume=False)) as session:
        assert look(snapshot) is not None
        session.stream("a red circle", num_chunks=1)
        assert look(snapshot) is None


def test_a_stream_is_replaced_only_where_resume_says_so(folder: Path, tmp_path: Path) -> None:
    lost_after(tmp_path, folder, num_shown=4, num_acknowledged=2)
    before = files_of(tmp_path)
    session = StreamSession(kept_in(tmp_path, folder))
    for _ in range(2):
        with pytest.raises(UserInputError, match=r"snapshot is of a stream of 4 chunks; resume=T"):
            session.stream("a red circle", num_chunks=1)
    session.close()
    assert files_of(tmp_path) == before
    with StreamSession(kept_in(tmp_path, folder, resume=False)) as session:
        assert len(list(session.stream("a red circle", num_chunks=1))) == 1
    assert len(read_history(tmp_path / "log").finished) == 1


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_process_alone_resumes_by_itself_what_its_own_run_left_and_no_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    """A start that was refused is refused when a launcher tries again."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "theirs")
    lost_after(tmp_path, folder, num_shown=2, num_acknowledged=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    with StreamSession(kept_in(tmp_path, folder)) as session:
        assert session.resumed_at_chunk == 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    with StreamSession(kept_in(tmp_path, folder)) as session:
        assert session.resumed_at_chunk is None
        with pytest.raises(UserInputError, match=r"snapshot is of a stream of 2 chunks; resume=T"):
            session.stream("a red circle", num_chunks=1)


def test_who_looks_at_an_earlier_stream_may_replace_it(folder: Path, tmp_path: Path) -> None:
    lost_after(tmp_path, folder, num_shown=4, num_acknowledged=2)
    with StreamSession(kept_in(tmp_path, folder), check_replaced=lambda: None) as session:
        assert len(list(session.stream("a red circle", num_chunks=1))) == 1
    assert len(read_history(tmp_path / "log").finished) == 1


@pytest.mark.parametrize(
    ("snapshot", "resume", "attempt", "num_chunks"),
    [
        (None, None, 0, 1),
        ("new", None, 0, 1),
        ("new", True, 0, 1),
        (None, None, 1, 1),
        ("new", None, 1, 1),
    ],
)
def test_a_log_without_its_snapshot_is_replaced_only_where_resume_says_so(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: str | None,
    resume: bool | None,
    attempt: int,
    num_chunks: int,
) -> None:
    """Neither a folder that is misspelt nor a launcher that tries again makes it worth less."""
    lost_after(tmp_path, folder, num_shown=num_chunks, num_acknowledged=1, snapshot=None)
    before = files_of(tmp_path)
    place = None if snapshot is None else tmp_path / snapshot
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
    with (
        pytest.raises(UserInputError, match=f"log: is there already, of a stream of {num_chunks} "),
        StreamSession(kept_in(tmp_path, folder, snapshot=place, resume=resume)) as session,
    ):
        session.stream("a red circle", num_chunks=1)
    assert files_of(tmp_path) == before
    with StreamSession(kept_in(tmp_path, folder, snapshot=place, resume=False)) as session:
        assert len(list(session.stream("a red circle", num_chunks=1))) == 1


def test_no_chunk_is_logged_before_a_first_resume_point_is_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of one chunk is a stream as any other: no crash leaves that without a snapshot."""
    with (
        monkeypatch.context() as patch,
        pytest.raises(SnapshotError),
        StreamSession(kept_in(tmp_path, folder)) as session,
    ):
        patch.setattr(SnapshotFolder, "write", raising(OSError(errno.EIO, "Input/output error")))
        next(session.stream("a red circle"))
    assert not read_history(tmp_path / "log").finished
    with StreamSession(kept_in(tmp_path, folder)) as session:
        assert len(list(session.stream("a red circle", num_chunks=1))) == 1


def test_what_is_read_and_opened_of_an_earlier_stream_is_watched(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer is told of, and holds up no rank whose group has failed."""
    lost_after(tmp_path, folder, num_shown=1, num_acknowledged=1)
    watchdog, watched = Watchdog(), list[str]()

    def note(*_: object) -> None:
        watched.extend(each.what for each in watchdog._sections if each.ends_with_group)

    monkeypatch.setattr(EarlierStream, "_check_latents", note)
    monkeypatch.setattr("scope_rt.record.stream_log.resume_log", noting(note, resume_log))
    instruments = Instruments(watchdog=watchdog)
    with StreamSession(kept_in(tmp_path, folder, resume=True), instruments=instruments) as session:
        list(session.stream("none", num_chunks=1))
    assert watched == ["reading what an earlier stream left", "opening the stream log"]


def test_a_second_stream_of_one_session_is_no_other_stream(folder: Path, tmp_path: Path) -> None:
    with StreamSession(kept_in(tmp_path, folder)) as session:
        for _ in range(2):
            assert len(list(session.stream("a red circle", num_chunks=2))) == 2


def test_a_consumer_that_lost_chunks_is_told_to_start_anew(folder: Path, tmp_path: Path) -> None:
    lost_after(tmp_path, folder, num_shown=4, num_acknowledged=4)
    with pytest.raises(UserInputError, match=r"holds 0 chunks, .*start a new stream"):
        resumed(tmp_path, folder, num_acknowledged=0)


def test_the_snapshot_of_another_seed_is_refused(folder: Path, tmp_path: Path) -> None:
    lost_after(tmp_path, folder, num_shown=1, num_acknowledged=1)
    with pytest.raises(UserInputError, match="seed 5, this one has 6"):
        StreamSession(kept_in(tmp_path, folder, seed=6, resume=True))


def test_a_frozen_log_saves_no_later_resume_point(folder: Path, tmp_path: Path) -> None:
    """A snapshot beyond the log's end could not be resumed; the stream itself continues."""
    session = StreamSession(kept_in(tmp_path, folder))
    stream = session.stream("a red circle", num_chunks=NUM_CHUNKS)
    shown = [next(stream), next(stream)]
    before = look(tmp_path / "snapshot")
    assert before is not None
    session.log.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(session.log), "failure", "the disk is full")
        shown += [next(stream), next(stream)]
    assert look(tmp_path / "snapshot") == before
    again = resumed(tmp_path, folder, num_acknowledged=before.next_chunk_index)
    assert again[0].chunk_index == before.next_chunk_index


def test_a_run_that_is_lost_as_its_second_stream_begins_starts_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    with StreamSession(kept_in(tmp_path, folder)) as session:
        assert len(list(session.stream("a red circle", num_chunks=2))) == 2
        session._recovery.begin("a blue square")  # type: ignore[union-attr]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(UserInputError, match="is there already, of a stream of 2 chunks"):
        lost_after(tmp_path, folder, num_shown=1, num_acknowledged=1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with StreamSession(kept_in(tmp_path, folder)) as session:
        assert len(list(session.stream("a red circle", num_chunks=2))) == 2


def test_a_stream_of_another_log_version_is_refused_by_it_whatever_else_differs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(*arguments: Any, **options: Any) -> Opened:
        return replace(opened(*arguments, **options), log_version=5)

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "opened", older)
        lost_after(tmp_path, folder, num_shown=2, num_acknowledged=2)
    with pytest.raises(UserInputError, match=r"is of another version \(log_version: got 5, want"):
        StreamSession(kept_in(tmp_path, folder, seed=6, resume=True))
