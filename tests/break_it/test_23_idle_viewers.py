"""A viewer who never reads loses its own chunks and nobody else's."""

from tests.break_it.broken import Broken


def test_neither_the_stream_nor_another_viewer_notices_one_who_never_reads(
    broken: Broken,
) -> None:
    result = broken("idle-viewers")
    assert (result.ends, result.num_chunks) == (("left",) * 2, 8)
