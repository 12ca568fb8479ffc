from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.session import ScheduledEvent
from scope_runners.job import Timeline, check_machine, check_outputs, place_events, prepare
from scope_runners.request import parse_stream_request
from tests.tiny_folder import write_tiny_folder


def place(*arguments: str, fps: int = 16, frames_per_chunk: int = 12) -> Timeline:
    request = parse_stream_request(["--prompt", "a red circle", *arguments])
    return place_events(request, fps=fps, frames_per_chunk=frames_per_chunk)


def test_an_event_takes_the_first_chunk_that_starts_at_its_time_or_later() -> None:
    timeline = place("--hard-cut-at", "6s", "--prompt-at", "6.01s:p", "--prompt-at", "0.1s:q")
    assert timeline.events == (
        ScheduledEvent(chunk_index=1, prompt="q"),
        ScheduledEvent(chunk_index=8, hard_cut=True),
        ScheduledEvent(chunk_index=9, prompt="p"),
    )


def test_chunks_follow_the_rate_and_the_codec() -> None:
    timeline = place("--seconds", "3", "--hard-cut-at", "1", fps=24, frames_per_chunk=9)
    assert (timeline.num_chunks, timeline.frames_per_chunk) == (8, 9)
    assert timeline.events == (ScheduledEvent(chunk_index=3, hard_cut=True),)


def test_a_prompt_and_a_cut_at_one_time_are_one_event() -> None:
    timeline = place("--hard-cut-at", "3", "--prompt-at", "3:p")
    assert timeline.events == (ScheduledEvent(chunk_index=4, prompt="p", hard_cut=True),)


def test_of_two_prompts_for_one_chunk_the_later_time_wins() -> None:
    timeline = place("--prompt-at", "0.7:late", "--prompt-at", "0.2:early")
    assert timeline.events == (ScheduledEvent(chunk_index=1, prompt="late"),)


def test_events_after_the_end_are_named_and_left_to_a_longer_stream() -> None:
    timeline = place("--seconds", "2", "--prompt-at", "7s:p", "--hard-cut-at", "1.5")
    assert timeline.ignored == ("--prompt-at 7s",)
    assert timeline.events == (ScheduledEvent(chunk_index=2, hard_cut=True),)
    assert timeline.later == (ScheduledEvent(chunk_index=10, prompt="p"),)


def test_the_embedded_model_makes_chunks_of_its_own_size() -> None:
    job = prepare(parse_stream_request(["--prompt", "a red circle", "--seconds", "20"]))
    assert (job.timeline.frames_per_chunk, job.timeline.num_chunks) == (12, 27)
    recipe = job.setup.recipe
    assert (job.setup.height, job.setup.width) == (recipe.default_height, recipe.default_width)


def test_a_cache_that_does_not_suit_the_model_is_refused_by_its_setting(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    arguments = ["--prompt", "a red circle", "--model", str(folder), "--kv-cache", "quantized:int4"]
    with pytest.raises(UserInputError, match=r"kv_cache quantized:int4: keys dim: got 12.*int8"):
        prepare(parse_stream_request(arguments))


def test_more_ranks_than_cores_must_be_asked_for() -> None:
    arguments = ["--prompt", "a red circle", "--plan", "pp1", "--tp", "2"]
    job = prepare(parse_stream_request(arguments))
    check_machine(job, num_cores=3, num_gpus=0)
    with pytest.raises(UserInputError, match=r"3 processes.* 2 CPU cores; add --oversubscribe"):
        check_machine(job, num_cores=2, num_gpus=0)
    check_machine(
        prepare(parse_stream_request([*arguments, "--oversubscribe"])),
        num_cores=2,
        num_gpus=0,
    )


def test_more_ranks_than_gpus_are_refused() -> None:
    job = prepare(parse_stream_request(["--prompt", "a red circle", "--plan", "pp1"]))
    with pytest.raises(UserInputError, match="CUDA_VISIBLE_DEVICES"):
        check_machine(job, num_cores=8, num_gpus=1)


def test_checking_the_outputs_leaves_nothing_behind(tmp_path: Path) -> None:
    arguments = ["--prompt", "a red circle", "--out", str(tmp_path / "a.mp4")]
    job = prepare(parse_stream_request(arguments))
    check_outputs(job)
    files = job.files
    assert (files.contact_sheet.name, files.summary.name) == ("a.png", "a.json")
    assert list(tmp_path.iterdir()) == []
