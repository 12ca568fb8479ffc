"""`current_start_frame` follows the stream's progression on every rank, or the stream stops."""

from tests.break_it.broken import Broken, said


def test_a_start_frame_that_is_off_never_leaves_rank0(broken: Broken) -> None:
    result = broken("start-frame/planned")
    wanted = "StartFrameError: chunk 3: current_start_frame: got 10, want 9"
    assert said(result, 0).startswith(wanted)
    assert result.ends[1] == "left"


def test_a_start_frame_that_is_off_on_arrival_is_refused_by_the_leader(broken: Broken) -> None:
    result = broken("start-frame/sent")
    assert said(result, 1).startswith("StartFrameError: chunk 3: current_start_frame: got 10")
    assert result.num_chunks <= 3


def test_a_start_frame_that_is_off_on_rank_1_alone_is_refused_there(broken: Broken) -> None:
    result = broken("start-frame/one-rank")
    assert said(result, 1).startswith("StartFrameError: chunk 3: current_start_frame: got 10")
    assert result.ends[0] == "PeerLostError"
