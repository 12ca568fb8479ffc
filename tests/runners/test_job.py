import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import count
from pathlib import Path

import pytest
import torch

from scope_contracts.errors import UserInputError
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.models.loading import ModelFolder
from scope_rt.part_place import PartPlace
from scope_rt.text.encoder import TextEncoder
from scope_rt.vae.codec import VideoCodec
from scope_runners import stream
from scope_runners.fork_server import RankEnded
from scope_runners.job import Timeline, check_machine, place_events, prepare
from scope_runners.outputs import check_outputs
from scope_runners.request import parse_stream_request
from tests.tiny_folder import write_tiny_folder


def place(*arguments: str, fps: int = 16, first: int = 12, later: int = 12) -> Timeline:
    request = parse_stream_request(["--prompt", "a red circle", *arguments])
    return place_events(request, fps=fps, first_frames=first, later_frames=later)


def test_an_event_takes_the_first_chunk_that_starts_at_its_time_or_later() -> None:
    timeline = place("--hard-cut-at", "6s", "--prompt-at", "6.01s:p", "--prompt-at", "0.1s:q")
    assert timeline.events == (
        ScheduledEvent(chunk_index=1, prompt="q"),
        ScheduledEvent(chunk_index=8, hard_cut=True),
        ScheduledEvent(chunk_index=9, prompt="p"),
    )


def test_chunks_follow_the_rate_and_the_codec() -> None:
    timeline = place("--seconds", "3", "--hard-cut-at", "1", fps=24, first=9, later=9)
    assert (timeline.num_chunks, timeline.num_frames) == (8, 72)
    assert timeline.events == (ScheduledEvent(chunk_index=3, hard_cut=True),)


WAN = {"first": 9, "later": 12}
"""Frames of a chunk of three latent frames, whose first is one frame where an epoch begins."""


def test_an_epoch_s_shorter_first_chunk_is_made_up_for() -> None:
    assert (place("--seconds", "3", **WAN).num_chunks, place("--seconds", "3").num_chunks) == (5, 4)
    exact = place("--seconds", "2.0625", **WAN)  # 9 + 12 + 12
    assert (exact.num_chunks, exact.num_frames) == (3, 33)
    short = place("--seconds", "0.5", **WAN)
    assert (short.num_chunks, short.num_frames) == (1, 9)


def test_events_wait_for_the_chunk_that_starts_at_their_time_after_every_cut_before() -> None:
    timeline = place(
        *("--hard-cut-at", "1", "--hard-cut-at", "3.5", "--hard-cut-at", "3.6"),
        *("--prompt-at", "0.5625:a", "--prompt-at", "2:b", "--prompt-at", "9:c", "--seconds", "5"),
        **WAN,
    )
    # The chunks start at frames 0 9 | 21 30 42 54 | 66 75; a second has 16.
    assert timeline.events == (
        ScheduledEvent(chunk_index=1, prompt="a"),
        ScheduledEvent(chunk_index=2, hard_cut=True),
        ScheduledEvent(chunk_index=4, prompt="b"),
        ScheduledEvent(chunk_index=6, hard_cut=True),
    )
    assert (timeline.num_chunks, timeline.num_frames) == (8, 87)
    assert timeline.later == (ScheduledEvent(chunk_index=13, prompt="c"),)


def walk(first: int, later: int, fps: int, cuts: set[Fraction]) -> Iterator[tuple[int, set[int]]]:
    """Where each chunk starts, in frames, and the chunks so far that begin an epoch."""
    start, open_cuts, epochs = 0, set(cuts), {0}
    for index in count():
        due = {at_s for at_s in open_cuts if at_s * fps <= start}
        epochs |= {index} if due else set()
        open_cuts -= due
        yield start, set(epochs)
        start += first if index in epochs else later


@pytest.mark.parametrize("sixteenths", range(1, 97))
def test_places_are_those_of_a_walk_over_the_chunks(sixteenths: int) -> None:
    cuts = {Fraction(2), Fraction(33, 16), Fraction(4)}
    at_s = Fraction(sixteenths, 16)
    flags = [part for cut in sorted(cuts) for part in ("--hard-cut-at", str(float(cut)))]
    timeline = place("--seconds", str(float(at_s)), *flags, **WAN)
    index, (start, epochs) = next(
        (index, chunk)
        for index, chunk in enumerate(walk(9, 12, 16, cuts))
        if chunk[0] >= sixteenths
    )
    assert (timeline.num_chunks, timeline.num_frames) == (index, start)
    placed = {event.chunk_index for event in timeline.events}
    assert placed == {chunk for chunk in epochs - {0} if chunk < index}


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
    assert (job.timeline.num_frames, job.timeline.num_chunks) == (324, 27)
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


def test_more_generator_ranks_than_gpus_are_refused() -> None:
    arguments = ["--prompt", "a red circle", "--plan", "pp1"]
    check_machine(prepare(parse_stream_request(arguments)), num_cores=8, num_gpus=1)
    job = prepare(parse_stream_request([*arguments, "--tp", "2"]))
    with pytest.raises(UserInputError, match=r"2 generator ranks .* 1 GPUs.*CUDA_VISIBLE_DEVICES"):
        check_machine(job, num_cores=8, num_gpus=1)


def test_a_dtype_may_be_given_in_short() -> None:
    job = prepare(parse_stream_request(["--prompt", "a red circle", "--dtype", "bf16"]))
    assert job.setup.dtype is torch.bfloat16
    assert prepare(parse_stream_request(["--prompt", "a red circle"])).setup.dtype is torch.float32


def test_checking_the_outputs_leaves_nothing_behind(tmp_path: Path) -> None:
    arguments = ["--prompt", "a red circle", "--out", str(tmp_path / "a.mp4")]
    job = prepare(parse_stream_request(arguments))
    check_outputs(job)
    files = job.files
    assert (files.contact_sheet.name, files.summary.name) == ("a.png", "a.json")
    assert list(tmp_path.iterdir()) == []


def test_a_format_that_is_not_written_is_refused_beside_a_video_of_that_name(
    tmp_path: Path,
) -> None:
    for name in ("a.mp4", "a.json"):
        (tmp_path / name).touch()
    arguments = ["--prompt", "a red circle", "--out", str(tmp_path / "a.avi")]
    with pytest.raises(UserInputError, match=r"got suffix '\.avi', want one of \.mp4, \.webm"):
        check_outputs(prepare(parse_stream_request(arguments)))


def test_ranks_are_launched_by_a_process_that_holds_no_codec_and_no_text_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside UMT5 and an autoencoder in the launcher, rank0 would load them a second time."""
    loaded = list["weakref.ref[VideoCodec] | weakref.ref[TextEncoder]"]()
    codec, text_encoder = ModelFolder.codec, ModelFolder.text_encoder

    def watched_codec(model: ModelFolder, *place: PartPlace) -> VideoCodec:
        loaded.append(weakref.ref(part := codec(model, *place)))
        return part

    def watched_text_encoder(model: ModelFolder, *place: PartPlace) -> TextEncoder:
        loaded.append(weakref.ref(part := text_encoder(model, *place)))
        return part

    def launched(*arguments: object, **options: object) -> int:
        assert [part() for part in loaded] == [None]  # the encoder of words, which read the prompt
        return 7

    monkeypatch.setattr(ModelFolder, "codec", watched_codec)
    monkeypatch.setattr(ModelFolder, "text_encoder", watched_text_encoder)
    monkeypatch.setattr(stream, "launch_attempts", launched)
    arguments = ["--prompt", "a red circle", "--plan", "pp1", "--oversubscribe"]
    arguments += ["--out", str(tmp_path / "a.mp4")]
    assert stream.run_here_or_launch(parse_stream_request(arguments), arguments) == 7


@pytest.mark.parametrize(
    ("rank0", "code", "said"),
    [(-15, 143, "scope-rt: interrupted\n"), (143, 143, ""), (-9, 137, "")],
)
def test_a_launcher_says_that_a_person_ended_a_rank0_which_could_not(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rank0: int,
    code: int,
    said: str,
) -> None:
    def launched(*_: object, on_event: Callable[[int, RankEnded], None], **__: object) -> int:
        on_event(0, RankEnded(0, rank0))
        return code

    monkeypatch.setattr(stream, "launch_attempts", launched)
    arguments = ["--prompt", "a red circle", "--plan", "pp1", "--oversubscribe"]
    arguments += ["--out", str(tmp_path / "a.mp4")]
    assert stream.run_here_or_launch(parse_stream_request(arguments), arguments) == code
    assert capsys.readouterr().err == said
