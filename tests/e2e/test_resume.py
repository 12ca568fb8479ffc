"""A stream that lost everything but its checkpoint goes on: no chunk twice, none missing."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.config import RuntimeConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.mesh.rank import Rank
from scope_rt.record.snapshot import num_chunks_saved, run_that_saved
from scope_rt.session import ScheduledEvent, StreamSession
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


def whole(folder: Path, *, rebuilt_at: int | None) -> list[Chunk]:
    """The stream that nothing happens to, or that is asked for a rebuild."""
    events = list(EVENTS)
    if rebuilt_at is not None:
        events.append(ScheduledEvent(chunk_index=rebuilt_at, recompute=True))
    with StreamSession(folder, seed=5, config=RuntimeConfig()) as session:
        return list(session.stream("a red circle", num_chunks=NUM_CHUNKS, schedule=events))


def lost_after(folder: Path, checkpoint: Path, *, num_shown: int, num_held: int) -> list[Chunk]:
    """A stream that ends without a word, its consumer holding `num_held` chunks for good."""
    session = StreamSession(folder, seed=5, checkpoint=checkpoint, config=RuntimeConfig())
    shown: list[Chunk] = []
    for chunk in session.stream(
        "a red circle",
        num_chunks=NUM_CHUNKS,
        schedule=EVENTS,
        num_held=lambda: min(len(shown), num_held),
    ):
        shown.append(chunk)
        if len(shown) == num_shown:
            break
    return shown[:num_held]


def gone_on(folder: Path, checkpoint: Path, *, num_held: int) -> list[Chunk]:
    with StreamSession(
        folder, seed=5, checkpoint=checkpoint, resume=True, config=RuntimeConfig()
    ) as session:
        return list(session.stream("none", num_chunks=NUM_CHUNKS, num_held=lambda: num_held))


def same(got: Sequence[Chunk], want: Sequence[Chunk]) -> bool:
    return len(got) == len(want) and all(
        a.latents_sha256 == b.latents_sha256
        and (a.frames == b.frames).all()
        and a.prompt == b.prompt
        and a.chunk_index == b.chunk_index
        for a, b in zip(got, want, strict=True)
    )


@pytest.mark.parametrize(("num_shown", "num_held"), [(1, 0), (3, 2), (4, 4), (7, 5), (8, 8)])
def test_a_resumed_stream_equals_one_that_rebuilds_its_cache_there(
    folder: Path, tmp_path: Path, num_shown: int, num_held: int
) -> None:
    checkpoint = tmp_path / "checkpoint"
    kept = lost_after(folder, checkpoint, num_shown=num_shown, num_held=num_held)
    stream = kept + gone_on(folder, checkpoint, num_held=num_held)
    assert same(stream, whole(folder, rebuilt_at=num_shown))
    assert same(stream[:num_shown], whole(folder, rebuilt_at=None)[:num_shown])


def test_a_stream_can_be_lost_again_and_again(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    stream = lost_after(folder, checkpoint, num_shown=1, num_held=1)
    while len(stream) < NUM_CHUNKS:
        session = StreamSession(
            folder, seed=5, checkpoint=checkpoint, resume=True, config=RuntimeConfig()
        )
        held = len(stream)
        more = session.stream("none", num_chunks=NUM_CHUNKS, num_held=lambda: held)  # noqa: B023
        stream.append(next(iter(more)))
    assert [chunk.chunk_index for chunk in stream] == list(range(NUM_CHUNKS))
    assert [chunk.cache_epoch for chunk in stream] == [0] * 7 + [1] * 2


def test_without_a_checkpoint_file_a_resumed_session_starts_anew(
    folder: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "none"
    with StreamSession(
        folder, seed=5, checkpoint=checkpoint, resume=True, config=RuntimeConfig()
    ) as session:
        assert session.resumed_at_chunk is None
        chunks = list(session.stream("a red circle", num_chunks=NUM_CHUNKS, schedule=EVENTS))
    assert same(chunks, whole(folder, rebuilt_at=None))


def test_a_new_stream_is_not_measured_by_what_an_earlier_run_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    lost_after(folder, checkpoint, num_shown=4, num_held=4)
    assert num_chunks_saved(checkpoint) == 4
    earlier = run_that_saved(checkpoint)
    assert num_chunks_saved(checkpoint, unless_by=earlier) == 0
    monkeypatch.setattr(Rank, "run_id", "another")
    lost_after(folder, checkpoint, num_shown=1, num_held=1)
    assert num_chunks_saved(checkpoint, unless_by=earlier) == 1


def test_a_session_that_is_refused_leaves_the_checkpoint_and_a_new_one_removes_it(
    folder: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    lost_after(folder, checkpoint, num_shown=1, num_held=1)
    with pytest.raises(UserInputError, match="choose another file"):
        StreamSession(folder, checkpoint=checkpoint, record=tmp_path, config=RuntimeConfig())
    assert checkpoint.exists()
    with StreamSession(folder, checkpoint=checkpoint, config=RuntimeConfig()) as session:
        assert checkpoint.exists()
        session.stream("a red circle", num_chunks=1)
        assert not checkpoint.exists()


def test_a_consumer_that_lost_chunks_is_told_what_to_delete(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    lost_after(folder, checkpoint, num_shown=4, num_held=4)
    with pytest.raises(UserInputError, match=f"holds 0 chunks, the checkpoint {checkpoint} goes"):
        gone_on(folder, checkpoint, num_held=0)


def test_the_checkpoint_of_another_seed_is_refused(folder: Path, tmp_path: Path) -> None:
    lost_after(folder, tmp_path / "checkpoint", num_shown=1, num_held=1)
    with pytest.raises(UserInputError, match="with seed 5, this one has 6"):
        StreamSession(
            folder,
            seed=6,
            checkpoint=tmp_path / "checkpoint",
            resume=True,
            config=RuntimeConfig(),
        )
