import threading
from dataclasses import dataclass

import pytest

from scope_rt.video.viewers import Viewer, ViewerHub


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """Something encoded: the hub needs its two numbers only."""

    chunk_index: int
    cache_epoch: int = 0


def emit_all(hub: ViewerHub[Packet], indices: range, *, cache_epoch: int = 0) -> None:
    for index in indices:
        assert hub.emit(Packet(chunk_index=index, cache_epoch=cache_epoch))


def read_all(viewer: Viewer[Packet]) -> list[int]:
    indices: list[int] = []
    while True:
        try:
            packet = viewer.next(timeout_s=0)
        except TimeoutError:
            return indices
        if packet is None:
            return indices
        indices.append(packet.chunk_index)


def test_a_viewer_that_never_reads_loses_its_oldest_and_nobody_else_does() -> None:
    hub = ViewerHub[Packet]()
    sleeper, reader = hub.join(max_chunks=4), hub.join(max_chunks=4)
    seen = []
    for index in range(1000):
        emit_all(hub, range(index, index + 1))
        seen += read_all(reader)
    assert seen == list(range(1000))
    assert (reader.dropped_chunks, sleeper.dropped_chunks) == (0, 996)
    assert read_all(sleeper) == [996, 997, 998, 999]


def test_a_viewer_sees_the_chunks_from_when_it_joined() -> None:
    hub = ViewerHub[Packet]()
    emit_all(hub, range(3))
    viewer = hub.join()
    emit_all(hub, range(3, 5))
    assert read_all(viewer) == [3, 4]
    assert viewer.dropped_chunks == 0


def test_a_dropping_cut_takes_older_epochs_out_of_every_queue() -> None:
    hub = ViewerHub[Packet]()
    viewers = [hub.join(max_chunks=8) for _ in range(3)]
    emit_all(hub, range(3))
    emit_all(hub, range(3, 5), cache_epoch=1)
    hub.cut(cache_epoch=1)
    for viewer in viewers:
        assert read_all(viewer) == [3, 4]
        assert viewer.dropped_chunks == 0


def test_a_late_chunk_of_a_dropped_epoch_is_never_handed_out() -> None:
    hub = ViewerHub[Packet]()
    viewer = hub.join()
    hub.cut(cache_epoch=2)
    assert not hub.emit(Packet(chunk_index=0, cache_epoch=1))
    assert hub.emit(Packet(chunk_index=1, cache_epoch=2))
    hub.cut(cache_epoch=1)
    assert not hub.emit(Packet(chunk_index=2, cache_epoch=1))
    assert read_all(viewer) == [1]


def test_a_cut_that_drops_nothing_lets_the_past_play_out() -> None:
    hub = ViewerHub[Packet]()
    viewer = hub.join()
    emit_all(hub, range(2))
    emit_all(hub, range(2, 4), cache_epoch=1)
    assert read_all(viewer) == [0, 1, 2, 3]


def test_a_chunk_that_a_restarted_stream_repeats_is_handed_out_once() -> None:
    hub = ViewerHub[Packet]()
    viewer = hub.join()
    emit_all(hub, range(3))
    assert not hub.emit(Packet(chunk_index=2))
    emit_all(hub, range(3, 4))
    assert read_all(viewer) == [0, 1, 2, 3]


def test_closing_ends_viewers_after_what_they_hold() -> None:
    hub = ViewerHub[Packet]()
    viewer = hub.join()
    emit_all(hub, range(2))
    hub.close()
    hub.close()
    assert not hub.emit(Packet(chunk_index=2))
    assert read_all(viewer) == [0, 1]
    assert viewer.next(timeout_s=0) is None
    assert hub.join().next(timeout_s=0) is None
    assert hub.num_viewers == 0


@pytest.mark.parametrize("end", ["close", "leave"])
def test_a_waiting_viewer_is_woken_by_the_end(end: str) -> None:
    hub = ViewerHub[Packet]()
    viewer = hub.join()
    got: list[Packet | None] = []
    thread = threading.Thread(target=lambda: got.append(viewer.next(timeout_s=60)))
    thread.start()
    (hub.close if end == "close" else viewer.leave)()
    thread.join(timeout=30)
    assert got == [None]


def test_a_viewer_that_left_takes_and_holds_nothing() -> None:
    hub = ViewerHub[Packet]()
    viewer, other = hub.join(), hub.join()
    emit_all(hub, range(2))
    viewer.leave()
    viewer.leave()
    emit_all(hub, range(2, 9))
    assert viewer.next(timeout_s=0) is None
    assert viewer.dropped_chunks == 0
    assert read_all(other) == [5, 6, 7, 8]
    assert hub.num_viewers == 1


def test_a_silent_stream_is_a_timeout_not_an_end() -> None:
    viewer = ViewerHub[Packet]().join()
    with pytest.raises(TimeoutError, match=r"no chunk within 0.01 s"):
        viewer.next(timeout_s=0.01)


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_chunks: got 0"):
        ViewerHub[Packet]().join(max_chunks=0)


def test_readers_on_threads_see_rising_indices_and_no_dropped_epoch() -> None:
    hub = ViewerHub[Packet]()
    first_epoch = 0
    faults: list[str] = []

    def read(viewer: Viewer[Packet]) -> None:
        last = -1
        while True:
            dropped_before = first_epoch
            packet = viewer.next(timeout_s=30)
            if packet is None:
                return
            if packet.chunk_index <= last or packet.cache_epoch < dropped_before:
                faults.append(f"{packet} after {last}, epoch {dropped_before}")
            last = packet.chunk_index

    threads = [threading.Thread(target=read, args=(hub.join(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for index in range(3000):
        hub.emit(Packet(chunk_index=index, cache_epoch=index // 100))
        if index % 100 == 0:
            hub.cut(cache_epoch=index // 100)
            first_epoch = index // 100
    hub.close()
    for thread in threads:
        thread.join(timeout=30)
    assert faults == []
