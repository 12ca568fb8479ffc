"""A refused clean stream is reported, a stopped run continues, and equal numbers steer alike."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from scope_contracts.errors import UserInputError
from scope_lab import clean_streams, false_alarms
from scope_lab.clean_streams import COMBINATIONS, StreamResult, run_stream, steering
from scope_lab.false_alarms import CAPABILITIES, capabilities_here, read, stream_all, table
from scope_rt.integrity.oracle import BlockAudit

HERE = capabilities_here()[-1]


def test_a_clean_stream_comes_near_no_bound() -> None:
    result = run_stream(HERE, 1, num_chunks=6)
    assert (result.chunks, result.error) == (6, "")
    assert 0 < result.closest < 1
    assert result.stage


def test_a_refused_stream_is_an_error_that_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = BlockAudit.stages

    def strict(self):  # type: ignore[no-untyped-def]
        for stage in stages(self):
            yield stage._replace(bound=stage.bound / 100)

    monkeypatch.setattr(BlockAudit, "stages", strict)
    result = run_stream(HERE, 1, num_chunks=6)
    assert result.chunks < 6
    assert result.error.startswith("IntegrityError: chunk ")
    assert result.closest > 1
    assert result.error in table([result])


def test_what_watched_a_stream_is_gone_after_it() -> None:
    stages = BlockAudit.stages
    run_stream(HERE, 0, num_chunks=1)
    assert BlockAudit.stages is stages


def test_a_stopped_run_continues_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[int]()

    def run(capability: str, number: int) -> StreamResult:
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(number)
        return StreamResult(capability=capability, number=number, combination="x", chunks=272)

    monkeypatch.setattr(false_alarms, "run_stream", run)
    progress = tmp_path / "progress.jsonl"
    with pytest.raises(KeyboardInterrupt):
        stream_all(HERE, 3 * clean_streams.CHUNKS + 1, progress)
    with open(progress, "a") as file:
        file.write('{"capability": "torn')
    assert [result.number for result in read(progress)] == [0, 1]
    ran.clear()
    stream_all(HERE, 3 * clean_streams.CHUNKS + 1, progress)
    assert ran == [2, 3]
    assert [result.number for result in read(progress)] == [0, 1, 2, 3]


def test_every_dtype_level_and_cache_has_streams() -> None:
    assert len({str(each) for each in COMBINATIONS}) == len(COMBINATIONS) == 2 * 2 * 7


def test_steering_follows_from_the_number_and_does_everything() -> None:
    events = steering(Random("clean 3"), 272)
    assert events == steering(Random("clean 3"), 272) != steering(Random("clean 4"), 272)
    assert any(event.prompt and event.transition for event in events)
    assert any(event.prompt and not event.transition for event in events)
    assert any(event.hard_cut for event in events)
    assert any(event.recompute for event in events)


def test_a_process_on_another_cpu_than_it_says_streams_nothing(tmp_path: Path) -> None:
    other = next(each for each in CAPABILITIES if each != HERE)
    with pytest.raises(UserInputError, match=f"ATEN_CPU_CAPABILITY={other}"):
        stream_all(other, 1, tmp_path / "none.jsonl")


def test_the_table_has_the_closest_stream_of_each_combination() -> None:
    one = StreamResult(
        capability="avx2", number=0, combination="a", chunks=5, closest=0.1, stage="first"
    )
    other = replace(one, number=9, closest=0.25, stage="second")
    (row,) = [line for line in table([one, other]).splitlines() if "avx2" in line]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "avx2", "a", "10", "0", "0.250", "second"
    ]  # fmt: skip


def test_capabilities_end_with_that_of_this_process() -> None:
    assert torch.backends.cpu.get_cpu_capability().lower() == HERE
