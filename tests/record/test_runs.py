"""Runs tell of chunks what a list of them would, and take the room of their cuts."""

from hypothesis import given
from hypothesis import strategies as st

from scope_rt.record.runs import Runs

INDICES = st.integers(0, 30)
STEPS = st.lists(st.tuples(st.booleans(), INDICES, st.integers(0, 2)), max_size=40)


@given(STEPS, INDICES, INDICES)
def test_runs_are_the_chunks_that_were_added_and_not_forgotten(
    steps: list[tuple[bool, int, int]], first: int, end: int
) -> None:
    runs, chunks = Runs(), list[tuple[int, int]]()
    for is_added, index, number in steps:
        chunks = [chunk for chunk in chunks if chunk[0] < index]
        if is_added:
            chunks.append((index, number))
            runs.add(index, number)
        else:
            runs.forget(index)
        assert list(runs) == chunks
        assert len(runs) == len(chunks)
        again = Runs()
        for span in runs.spans:
            again.add_span(*span)
        assert list(again) == chunks
    assert list(runs.between(first, end)) == [each for each in chunks if first <= each[0] < end]
    newest = runs.newest(first)
    assert list(newest) == chunks[max(0, len(chunks) - first) :]
    assert len(newest) == min(first, len(chunks))
    assert runs.number_of(first) == dict(chunks).get(first)
    if chunks:
        assert (runs.first, runs.last) == (chunks[0], chunks[-1])
