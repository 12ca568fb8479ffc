"""Who resumes a stream finds what it needs in the log, and keeps no more of a longer one."""

import gc
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from scope_contracts.log_records import Begun, Control
from scope_lab.sample_log import Story, durable, finished, opened, planned, segment, story, write
from scope_rt.record.log_index import LogIndex

MOST_BYTES = 8 * 900
"""Of 900 chunks more: not even a list of their numbers."""


def chunks(first: int, end: int) -> Story:
    return [
        record
        for index in range(first, end)
        for record in ((planned(index), b""), finished(index), (durable(index), b""))
    ]


def held_bytes(path: Path) -> int:
    """Of all objects that are kept of a log that was opened to resume its stream."""
    progress = LogIndex(path).progress
    assert progress.num_starts == 1
    found, pending = dict[int, Any](), list[Any]([progress])
    while pending:
        each = pending.pop()
        if id(each) not in found and not isinstance(each, type | ModuleType | FunctionType):
            found[id(each)] = each
            pending += gc.get_referents(each)
    return sum(map(sys.getsizeof, found.values()))


def test_a_log_of_ten_times_the_chunks_is_resumed_in_the_same_memory(tmp_path: Path) -> None:
    begun: Story = [(opened(), b""), (Begun(at_s=0.0, prompt="a"), b""), (segment(), b"")]
    short = write(tmp_path / "short", begun + chunks(0, 100))
    long = write(tmp_path / "long", begun + chunks(0, 1000))
    assert held_bytes(long) - held_bytes(short) < MOST_BYTES


def test_the_newest_chunks_before_a_resume_point_are_found_across_restarts(tmp_path: Path) -> None:
    begun: Story = [(opened(), b""), *chunks(0, 9), (opened(resumed_at_chunk=6), b"")]
    path = write(tmp_path / "log", [*begun, finished(6, 1, values=[6.0]), finished(7, 1)])
    found = LogIndex(path).newest_finished(4, before=8)
    assert [(each.chunk_index, each.cache_epoch) for each in found] == [
        *[(4, 0), (5, 0)],
        *[(6, 1), (7, 1)],
    ]
    assert [each.chunk_index for each in LogIndex(path).newest_finished(99, before=3)] == [0, 1, 2]


def test_control_input_is_found_by_where_it_took_effect(tmp_path: Path) -> None:
    log = LogIndex(write(tmp_path / "log", story()))
    prompt = log.newest_prompt(before=7)
    assert prompt is not None
    assert (prompt.chunk_index, prompt.prompt) == (2, "a green square")  # the cut at 6 has none
    assert log.newest_prompt(before=0) is None
    assert [each.chunk_index for each in log.controls_from(2)] == [2, 6]


def test_control_input_that_a_restart_takes_back_is_not_found(tmp_path: Path) -> None:
    control = Control(at_s=0.0, chunk_index=3, prompt="a", embeds_sha256="c" * 64)
    records: Story = [(opened(), b""), (control, b""), (opened(resumed_at_chunk=3), b"")]
    log = LogIndex(write(tmp_path / "log", records))
    assert log.newest_prompt(before=9) is None
    assert log.controls_from(0) == []
