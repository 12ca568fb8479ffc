"""A full disk ends the recording at its last whole record, and nothing else."""

from tests.break_it.broken import Broken


def test_the_stream_goes_on_whole_when_its_recording_cannot(broken: Broken) -> None:
    result = broken("disk-full")
    assert (result.ends, result.num_chunks) == (("left",) * 2, 8)
