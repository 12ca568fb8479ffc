"""Nothing of an epoch that was cut off gets past rank0: not to a file, not to a viewer."""

from tests.break_it.broken import Broken


def test_a_late_result_reaches_neither_recording_nor_video_nor_viewer(broken: Broken) -> None:
    assert broken("late-result/whole-pipe").num_chunks == 8
