"""The loop against a mesh that answers from memory: order, epochs, resume points."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import SnapshotError, UserInputError
from scope_contracts.log_records import Control, Dropped, Finished, Planned
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Ack, Conditioning, Directive, Receipt, ScheduledDirective
from scope_rt.control.resume_point import ResumePoint
from scope_rt.control.saved_points import SavedResumePoints
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.record.log import Log
from scope_rt.record.snapshot import SnapshotStore
from tests.control.memory_mesh import (
    CUT,
    FIELD,
    FieldDecoder,
    MemoryLog,
    MemoryMesh,
    MemoryResumePoints,
    loop_over,
)
from tests.tiny_folder import RECIPE


def other_prompt() -> Directive:
    return Directive(conditioning=Conditioning("q", torch.ones(1, 1, 1)))


def test_late_result_after_hard_cut_is_never_emitted() -> None:
    log = MemoryLog()
    loop = loop_over(MemoryMesh(), max_in_flight=2, log=log)
    stream = loop.run(5)
    emitted = [next(stream)]
    loop.inbox.post(CUT)  # chunk 1 is under way and belongs to the old epoch
    emitted += list(stream)
    assert [(c.chunk_index, c.cache_epoch) for c in emitted] == [
        (0, 0),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
    ]
    num_seen = [int(c.frames[-1, 0, 0, 0]) for c in emitted]
    assert num_seen == [3, 3, 6, 6, 6], "the decoder saw a late one"
    assert [r.chunk_index for r in log.records if isinstance(r, Dropped)] == [1]


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_scheduled_cut_drops_nothing(max_in_flight: int) -> None:
    loop = loop_over(MemoryMesh(), max_in_flight=max_in_flight)
    cut = ScheduledDirective(chunk_index=2, directive=Directive(hard_cut=True))
    loop.inbox.schedule([cut])
    emitted = [(c.chunk_index, c.cache_epoch) for c in loop.run(4)]
    assert emitted == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_the_loop_sends_the_next_chunk_before_it_waits() -> None:
    mesh = MemoryMesh()
    stream = loop_over(mesh, max_in_flight=2).run(4)
    assert next(stream).chunk_index == 0
    assert len(mesh.sent) == 2
    list(stream)
    assert len(mesh.sent) == 4, "chunks beyond the end were planned"


class Credit:
    """Chunks below `end` may be begun; who waits for another adds one, until `last`."""

    def __init__(self, end: int, last: int) -> None:
        self.end, self.last = end, last
        self.waited: list[int] = []

    def may_begin(self, chunk_index: int) -> bool:
        return chunk_index < self.end

    def wait(self, chunk_index: int) -> bool:
        self.waited.append(chunk_index)
        self.end = chunk_index + 1
        return chunk_index < self.last


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_no_chunk_is_planned_before_its_time_and_a_refusal_ends_the_stream(
    max_in_flight: int,
) -> None:
    mesh, pace = MemoryMesh(), Credit(1, last=3)
    stream = loop_over(mesh, max_in_flight=max_in_flight).run(pace=pace)
    assert next(stream).chunk_index == 0
    assert len(mesh.sent) == 1, "the pace allowed one"
    assert [chunk.chunk_index for chunk in stream] == [1, 2]
    assert pace.waited == [1, 2, 3]
    assert len(mesh.sent) == 3


def test_a_pace_that_is_ahead_fills_the_pipeline() -> None:
    mesh = MemoryMesh()
    stream = loop_over(mesh, max_in_flight=2).run(4, pace=Credit(9, last=9))
    next(stream)
    assert len(mesh.sent) == 2


def test_close_receives_what_is_under_way_first() -> None:
    mesh = MemoryMesh()
    loop = loop_over(mesh, max_in_flight=2)
    next(loop.run(9))
    loop.close()
    assert mesh.ended


def test_a_closed_loop_says_so_where_it_would_send() -> None:
    loop = loop_over(MemoryMesh(), max_in_flight=2)
    stream = loop.run(9)
    next(stream)
    loop.close()
    with pytest.raises(UserInputError, match="this session is closed; open a new one"):
        next(stream)


def saved_in(folder: Path) -> SavedResumePoints:
    return SavedResumePoints(
        store=SnapshotStore(folder), log=folder / "log", run_id="r", identity=(("seed", "1"),)
    )


def loaded_from(folder: Path, schedule: Sequence[ScheduledDirective] = ()) -> ResumePoint:
    """`schedule` is what the log has of it."""
    loaded = SnapshotStore(folder).load(ResumePoint)
    assert loaded is not None
    return loaded[1].with_schedule(schedule)


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("num_shown", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("num_behind", [0, 1, 2])
def test_a_lost_stream_resumes_without_repeating_or_missing_a_chunk(
    tmp_path: Path, max_in_flight: int, num_shown: int, num_behind: int
) -> None:
    """The consumer acknowledged `num_behind` chunks less than it was shown; all else is lost."""
    cuts = [ScheduledDirective(chunk_index=4, directive=Directive(hard_cut=True))]
    whole = loop_over(MemoryMesh(), max_in_flight=max_in_flight)
    whole.inbox.schedule(cuts)
    want = list(whole.run(8))

    acknowledged = max(0, num_shown - num_behind)
    loop = loop_over(
        MemoryMesh(), max_in_flight=max_in_flight, resume_points=saved_in(tmp_path / "s")
    )
    loop.inbox.schedule(cuts)
    kept: list[Chunk] = []
    for chunk in loop.run(8, acknowledged=lambda: max(0, len(kept) - num_behind)):
        kept.append(chunk)
        if len(kept) == num_shown:
            break

    mesh = MemoryMesh()
    mesh.ends = {index: 3 * index + 3 for index in range(8)}
    point = loaded_from(tmp_path / "s", cuts)
    again = loop_over(mesh, max_in_flight=max_in_flight, resumed=point)
    got = [*kept[:acknowledged], *again.run(8, acknowledged=lambda: acknowledged)]
    assert [c.chunk_index for c in got] == list(range(8))
    assert [c.cache_epoch for c in got] == [c.cache_epoch for c in want]
    assert [c.latents_sha256 for c in got] == [c.latents_sha256 for c in want]
    assert all((a.frames == b.frames).all() for a, b in zip(got, want, strict=True))
    assert mesh.sent == [] or mesh.sent[0].do_kv_recompute or mesh.sent[0].init_cache


def test_a_chunk_that_the_consumer_never_got_is_decoded_again_to_the_bit(tmp_path: Path) -> None:
    """The process ended between the save and the consumer: the tail is as long as it must be."""
    want = list(loop_over(MemoryMesh(), max_in_flight=1).run(8))
    loop = loop_over(MemoryMesh(), max_in_flight=1, resume_points=saved_in(tmp_path / "s"))
    for _ in zip(range(6), loop.run(8), strict=False):
        pass
    point = loaded_from(tmp_path / "s")
    assert point.tail.chunks[0].start_frame > 0
    mesh = MemoryMesh()
    mesh.ends = {index: 3 * index + 3 for index in range(8)}
    again = loop_over(mesh, max_in_flight=1, resumed=point)
    got = list(again.run(8, acknowledged=lambda: point.num_acknowledged))
    assert [c.chunk_index for c in got] == list(range(point.num_acknowledged, 8))
    for mine, theirs in zip(got, want[point.num_acknowledged :], strict=True):
        assert (mine.frames == theirs.frames).all()


def test_a_frozen_log_saves_no_later_resume_point(tmp_path: Path) -> None:
    """A resume point beyond the log's end could not be resumed; the stream itself continues."""
    log = MemoryLog()
    loop = loop_over(MemoryMesh(), max_in_flight=1, resume_points=saved_in(tmp_path), log=log)
    stream = loop.run(6)
    next(stream)
    next(stream)
    log.failure = "the disk is full"
    assert [chunk.chunk_index for chunk in stream] == [2, 3, 4, 5]
    assert loaded_from(tmp_path).counts.next_chunk_index == 2


def test_a_stream_that_nobody_can_resume_never_waits_for_its_log() -> None:
    class Unasked(MemoryLog):
        @property
        def offset(self) -> int:
            raise AssertionError("this blocks until all records are written")

    loop = loop_over(MemoryMesh(), max_in_flight=2, log=Unasked())
    receipt = loop.inbox.post(other_prompt())
    assert [chunk.chunk_index for chunk in loop.run(4)] == [0, 1, 2, 3]
    assert receipt.wait(0) is not None


def test_a_chunk_whose_resume_point_cannot_be_saved_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shown, it would be shown again by whoever resumes at the resume point before."""

    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    points = saved_in(tmp_path / "s")
    stream = loop_over(MemoryMesh(), max_in_flight=1, resume_points=points).run(8)
    next(stream)
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(SnapshotError, match="cannot write the snapshot"):
        next(stream)
    monkeypatch.undo()
    point = loaded_from(tmp_path / "s")
    assert [chunk.envelope.chunk_index for chunk in point.pending] == [0]


def test_after_a_resume_point_that_could_not_be_saved_another_stream_can_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The chunk that nobody got must not keep its place in the pipeline."""

    def refuse(*arguments: object, **options: object) -> None:
        raise SnapshotError("the disk is full")

    points = MemoryResumePoints()
    loop = loop_over(MemoryMesh(), max_in_flight=1, resume_points=points)
    stream = loop.run(8)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(points, "begin", lambda point, log: refuse)
        with pytest.raises(SnapshotError, match="the disk is full"):
            next(stream)
    loop.inbox.post(CUT)
    loop.begin()
    assert [(chunk.chunk_index, chunk.cache_epoch) for chunk in loop.run(2)] == [(2, 1), (3, 1)]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_shown", [0, 1, 2])
def test_no_chunk_of_a_stream_whose_input_could_not_be_saved_is_shown_in_the_next(
    num_shown: int, max_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is planned while control input awaits its save, not even the cut that begins it."""

    def refuse() -> None:
        raise SnapshotError("the disk is full")

    points = MemoryResumePoints()
    loop = loop_over(MemoryMesh(), max_in_flight=max_in_flight, resume_points=points)
    stream = loop.run(8)
    for _ in range(num_shown):
        next(stream)
    loop.inbox.post(Directive(conditioning=Conditioning("old", torch.ones(1, 1, 1))))
    with monkeypatch.context() as patch:
        patch.setattr(points, "begin", lambda point, log: refuse)
        with pytest.raises(SnapshotError, match="the disk is full"):
            next(stream)
    new = Conditioning("new", 2 * torch.ones(1, 1, 1))
    loop.inbox.post(replace(CUT, conditioning=new))
    loop.begin()
    shown = list(loop.run(3))
    assert {(chunk.cache_epoch, chunk.prompt) for chunk in shown} == {(shown[0].cache_epoch, "new")}
    assert len(shown) == 3


def test_a_chunk_s_resume_point_belongs_to_the_log_s_end_before_its_own_record() -> None:
    points, log = MemoryResumePoints(), MemoryLog()
    for chunk in loop_over(MemoryMesh(), max_in_flight=2, resume_points=points, log=log).run(4):
        index = chunk.chunk_index
        assert points.newest.pending[-1].envelope.chunk_index == index
        before, after = log.records[: points.saved[-1][1]], log.records[points.saved[-1][1] :]
        assert [r.chunk_index for r in before if isinstance(r, Finished)] == list(range(index))
        assert [type(r) for r in after] == [Finished]


def test_a_resume_point_is_on_its_way_while_its_chunk_is_decoded_and_there_before_it_is_shown() -> (
    None
):
    events: list[str] = []

    class Slow(MemoryResumePoints):
        def begin(self, point: ResumePoint, *, log: Log) -> Callable[[], None]:
            events.append("begin")
            return lambda: events.append("there")

    class Decoder(FieldDecoder):
        def decode(self, latents_BFCHW: Tensor) -> Tensor:
            events.append("decode")
            return super().decode(latents_BFCHW)

    loop = loop_over(MemoryMesh(), max_in_flight=1, resume_points=Slow())
    loop._decoding._decoder = Decoder()
    for _ in loop.run(2):
        events.append("shown")
    # The first save is of the prompt, which is acknowledged then.
    assert events == ["begin", "there"] + 2 * ["begin", "decode", "there", "shown"]


def test_the_tail_of_a_long_stream_stays_short() -> None:
    points = MemoryResumePoints()
    list(loop_over(MemoryMesh(), max_in_flight=2, resume_points=points).run(40))
    num_frames = sum(chunk.latents.shape[1] for chunk in points.newest.tail.chunks)
    block = RECIPE.frames_per_block
    assert num_frames <= block + max(FIELD, RECIPE.context_frames) + block - 1


def test_a_rebuild_waits_for_the_chunks_it_needs() -> None:
    mesh = MemoryMesh()
    loop = loop_over(mesh, max_in_flight=2)
    rebuild = ScheduledDirective(chunk_index=2, directive=Directive(recompute=True))
    loop.inbox.schedule([rebuild])
    emitted: list[Chunk] = []
    for chunk in loop.run(5):
        emitted.append(chunk)
        assert len(mesh.sent) <= len(emitted) + 2
    context = mesh.contexts[2]
    assert context is not None
    before = torch.cat([c.latents for c in emitted[:2]])
    num_recent = RECIPE.context_frames - RECIPE.sink_frames
    want = torch.cat([before[: RECIPE.sink_frames], before[-num_recent:]])
    assert torch.equal(context[0], want)
    assert [c.recomputed for c in emitted] == [False, False, True, False, False]


def test_a_consumer_behind_the_resume_point_is_refused() -> None:
    points = MemoryResumePoints()
    stream = loop_over(MemoryMesh(), max_in_flight=1, resume_points=points).run(8)
    for _ in range(4):
        next(stream)
    again = loop_over(MemoryMesh(), max_in_flight=1, resumed=points.newest)
    with pytest.raises(UserInputError, match=r"holds 0 chunks, .* acknowledged up to 3"):
        next(again.run(8, acknowledged=lambda: 0))


def test_control_input_that_was_acknowledged_outlives_the_process() -> None:
    points = MemoryResumePoints()
    loop = loop_over(MemoryMesh(), max_in_flight=2, resume_points=points)
    stream = loop.run(8)
    next(stream)
    receipt = loop.inbox.post(other_prompt())
    next(stream)  # chunk 2 was sent with it, and is still on its way; then everything is lost
    ack = receipt.wait(0)
    assert ack is not None
    assert ack.chunk_index == 2
    (kept,) = [e for e in points.newest.scheduled if e.chunk_index == ack.chunk_index]
    assert kept.directive.conditioning is not None
    assert kept.directive.conditioning.prompt == "q"


def test_control_input_is_acknowledged_no_earlier_than_it_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it is planned while a chunk awaits its decode, between two resume points."""
    points = MemoryResumePoints()
    loop = loop_over(MemoryMesh(), max_in_flight=2, resume_points=points)
    receipts: list[Receipt] = []
    decode = loop._decoding._decoder.decode
    seen: list[Ack | None] = []

    def decode_watched(latents: Tensor) -> Tensor:
        seen.extend(receipt.wait(0) for receipt in receipts)
        return decode(latents)

    monkeypatch.setattr(loop._decoding._decoder, "decode", decode_watched)
    for chunk in loop.run(8):
        if chunk.chunk_index == 3:
            rebuild = replace(other_prompt(), recompute=True)  # it waits until nothing is in flight
            receipts.append(loop.inbox.post(rebuild))
        acknowledged = [receipt.wait(0) for receipt in receipts]
        if any(acknowledged):
            point = points.newest
            conditionings = [point.conditioning] + [
                event.directive.conditioning for event in point.scheduled
            ]
            assert "q" in [text.prompt for text in conditionings if text is not None]
    assert seen[0] is None, "planned, and not saved yet"
    assert receipts[0].wait(0) is not None


def test_a_cut_need_not_wait_for_the_context_of_what_it_cuts_off() -> None:
    loop = loop_over(MemoryMesh(), max_in_flight=2)
    loop.inbox.schedule([ScheduledDirective(chunk_index=2, directive=Directive(recompute=True))])
    stream = loop.run(4)
    emitted = [next(stream)]
    loop.inbox.post(CUT)
    emitted += list(stream)
    assert [(c.chunk_index, c.cache_epoch) for c in emitted] == [(0, 0), (2, 1), (3, 1), (4, 1)]


def test_control_input_is_acknowledged_with_the_chunk_that_has_it() -> None:
    log = MemoryLog()
    loop = loop_over(MemoryMesh(), max_in_flight=2, log=log)
    stream = loop.run(6)
    next(stream)
    receipt = loop.inbox.post(other_prompt())
    chunks = list(stream)
    ack = receipt.wait(0)
    assert ack is not None
    first = ack.chunk_index
    assert [c.prompt for c in chunks] == ["p"] * (first - 1) + ["q"] * (6 - first)
    control = [r for r in log.records if isinstance(r, Control)]
    assert [(r.chunk_index, r.prompt) for r in control] == [(0, "p"), (first, "q")]
    assert [r.envelope.chunk_index for r in log.records if isinstance(r, Planned)] == [*range(6)]


def test_a_soft_transition_changes_text_and_bias_and_no_cache() -> None:
    mesh = MemoryMesh()
    loop = loop_over(mesh, max_in_flight=1)
    stream = loop.run(6)
    next(stream)
    spec = TransitionSpec(num_chunks=3, method=Interpolation.LERP, bias_floor=0.2)
    text = Conditioning("q", torch.ones(1, 1, 1))
    loop.inbox.post(Directive(conditioning=text, transition=spec))
    list(stream)
    assert [e.reset_crossattn_cache for e in mesh.sent] == [True, True, True, True, False, False]
    assert [e.kv_cache_attention_bias < 1 for e in mesh.sent] == [0, 1, 1, 0, 0, 0]
    assert not any(e.reset_kv_cache for e in mesh.sent[1:])
