"""A stream is a pure function of seed, prompts and schedule, and it never grows."""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.loading import ModelFolder
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_rt.text.words import WordTextEncoder
from tests.tiny_folder import RECIPE, write_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def session(folder: Path) -> Iterator[StreamSession]:
    with StreamSession(StreamConfig.of(folder, seed=5)) as opened:
        yield opened


def digests(chunks: Iterator[Chunk]) -> list[str]:
    return [chunk.latents_sha256 for chunk in chunks]


def test_chunks_carry_frames_epochs_and_calls(session: StreamSession) -> None:
    events = [ScheduledEvent(chunk_index=2, prompt="blue square", hard_cut=True)]
    chunks = list(session.stream("a red circle", num_chunks=4, schedule=events))
    assert [c.chunk_index for c in chunks] == [0, 1, 2, 3]
    assert [c.cache_epoch for c in chunks] == [0, 0, 1, 1]
    assert [c.prompt for c in chunks] == ["a red circle"] * 2 + ["blue square"] * 2
    assert {c.frames.shape for c in chunks} == {(12, 16, 32, 3)}
    assert {c.generator_calls for c in chunks} == {3}


def test_a_chunk_is_printed_in_a_line_without_its_pixels(session: StreamSession) -> None:
    (chunk,) = session.stream("a red circle", num_chunks=1)
    printed = repr(chunk)
    assert "frames=uint8[12, 16, 32, 3], latents=float32[" in printed
    assert "'a red circle'" in printed
    assert len(printed) < 250


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("a red circle" + " the" * 5000, "want at most 16384"), ("a red circle \udcff", "UTF-8")],
)
def test_a_prompt_that_no_record_could_hold_is_refused_before_anything_starts(
    session: StreamSession, prompt: str, said: str
) -> None:
    """Without it in its log, no stream is resumed."""
    with pytest.raises(UserInputError, match=said):
        session.stream(prompt)


def test_equal_seeds_give_equal_streams_and_others_do_not(folder: Path) -> None:
    runs = []
    for seed in (5, 5, 6):
        with StreamSession(StreamConfig.of(folder, seed=seed)) as session:
            runs.append(digests(session.stream("red circle", num_chunks=3)))
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])


def test_word_order_and_case_do_not_matter(folder: Path) -> None:
    runs = []
    for prompt in (
        "a red circle and a blue square, fast, on navy",
        "FAST Blue Square red circle navy",
    ):
        with StreamSession(StreamConfig.of(folder, seed=5)) as session:
            runs.append(digests(session.stream(prompt, num_chunks=2)))
    assert runs[0] == runs[1]


def test_prompt_takes_effect_at_the_next_chunk_and_keeps_the_cache(session: StreamSession) -> None:
    stream = session.stream("red circle")
    first = next(stream)
    session.prompt("green triangle")
    second = next(stream)
    assert (first.prompt, second.prompt) == ("red circle", "green triangle")
    assert second.cache_epoch == first.cache_epoch


def test_hard_cut_from_another_thread_starts_a_new_epoch(session: StreamSession) -> None:
    stream = session.stream("red circle")
    before = next(stream)
    thread = threading.Thread(target=session.hard_cut)
    thread.start()
    thread.join(timeout=60)
    after = next(stream)
    assert after.cache_epoch == before.cache_epoch + 1


def test_a_bad_prompt_is_refused_and_the_stream_continues(session: StreamSession) -> None:
    stream = session.stream("red circle")
    next(stream)
    with pytest.raises(UserInputError, match="unknown word 'dragon'"):
        session.prompt("a red dragon")
    assert next(stream).prompt == "red circle"


def test_a_second_stream_of_a_session_is_a_new_epoch(session: StreamSession) -> None:
    list(session.stream("red circle", num_chunks=2))
    again = list(session.stream("red circle", num_chunks=2))
    assert [(c.chunk_index, c.cache_epoch) for c in again] == [(2, 1), (3, 1)]


@pytest.mark.parametrize("num_taken", [0, 1])
def test_a_second_stream_feeds_no_iterator_of_the_first(
    session: StreamSession, num_taken: int
) -> None:
    first = session.stream("red circle")
    for _ in range(num_taken):
        next(first)
    second = session.stream("blue square", num_chunks=2)
    assert next(second).prompt == "blue square"
    with pytest.raises(UserInputError, match=r"a later stream\(\) of this session has taken"):
        next(first)
    assert [chunk.prompt for chunk in second] == ["blue square"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "/nowhere"}, "does not exist"),
        ({"model": __file__}, "give a folder that has all"),
        ({"height": 40}, "try 32"),
        ({"width": 0}, "positive multiple of 16"),
        ({"plan": "pp9"}, "choose one of"),
        ({"plan": "pp0", "tp": 2}, "needs 3 processes, got 1"),
        ({"tp": 2}, "one process"),
        ({"seed": -1}, "seed: got -1, want a number at least 0"),
        ({"kv_cache_attention_bias": 0.0}, "want a number above 0 and at most 1"),
    ],
)
def test_bad_arguments_name_what_to_change(
    folder: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserInputError, match=message):
        StreamSession(StreamConfig.of(**{"model": folder} | arguments))


def test_tp_that_does_not_divide_the_heads_is_refused_before_any_rank_meets(folder: Path) -> None:
    with pytest.raises(UserInputError, match="tp 3 does not divide the model's 4 heads"):
        StreamSetup.of(
            StreamConfig.of(folder, plan="tp_v1_1", tp=3), LaunchEnvironment(world_size=3)
        )


@pytest.mark.timeout(600)
def test_a_stream_past_the_rope_table_keeps_nothing_of_its_chunks(session: StreamSession) -> None:
    """1,080 latent frames, of a 1,024-frame RoPE table; `lab` has 15,000, and all memory."""
    blocks = list[int]()
    for chunk in session.stream("red circle", num_chunks=360):
        if chunk.chunk_index in (180, 359):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            assert torch.isfinite(chunk.latents).all()
    assert 360 * RECIPE.frames_per_block > 1024
    warm, last = blocks
    assert last - warm < 179, "an object a chunk"


@pytest.mark.lab
def test_five_thousand_chunks_leave_memory_flat(session: StreamSession) -> None:
    """15,000 latent frames: far beyond a 1,024-frame RoPE table, every chunk finite."""

    def resident_mib() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096 / 2**20

    warm, last = 0.0, None
    for chunk in session.stream("red circle", num_chunks=5000):
        if chunk.chunk_index == 1000:
            gc.collect()
            warm = resident_mib()
        last = chunk
    assert last is not None
    assert last.chunk_index * RECIPE.frames_per_block > 14_000
    assert torch.isfinite(last.latents).all()
    gc.collect()
    assert resident_mib() - warm < 8


@pytest.mark.parametrize("level", IntegrityLevel)
def test_no_level_of_integrity_keeps_a_chunk_that_was_handed_out(
    folder: Path, level: IntegrityLevel
) -> None:
    with StreamSession(StreamConfig.of(folder, integrity=level)) as session:
        chunks = session.stream("a red circle", num_chunks=6)
        frames = [weakref.ref(chunk.frames) for chunk in chunks]
        gc.collect()
        assert sum(each() is not None for each in frames) <= 1


def test_an_abandoned_stream_leaves_nothing_to_the_next(session: StreamSession) -> None:
    next(session.stream("red circle", schedule=[ScheduledEvent(chunk_index=2, hard_cut=True)]))
    chunks = list(session.stream("blue square", num_chunks=3))
    assert [(c.prompt, c.cache_epoch) for c in chunks] == [("blue square", 1)] * 3


def test_closing_twice_is_closing_once(folder: Path) -> None:
    with StreamSession(StreamConfig.of(folder)) as session:
        next(session.stream("red circle"))
        assert session.close() == session.close()


def test_a_failure_inside_a_chunk_keeps_its_own_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        StreamSession(StreamConfig.of(folder)) as session,
    ):
        stream = session.stream("red circle")
        next(stream)
        monkeypatch.setattr(ChunkGenerator, "generate", interrupt)
        next(stream)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stream(folder: Path, dtype: torch.dtype) -> None:
    with StreamSession(StreamConfig.of(folder, dtype=dtype)) as session:
        (chunk,) = session.stream("red circle", num_chunks=1)
    assert chunk.latents.dtype is dtype
    assert chunk.frames.std() > 0


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SCOPE_TP_PLAN": "pp0"}, "SCOPE_TP_PLAN is 'pp0'"),
        ({"SCOPE_PP_ENABLED": "1"}, "SCOPE_PP_ENABLED"),
        ({"SCOPE_TP_ALLOW_COMPILE": "1"}, "not supported yet"),
    ],
)
def test_an_environment_that_asks_for_something_else_is_refused(
    folder: Path, environ: dict[str, str], message: str
) -> None:
    config = StreamConfig.load(model=folder, environ=environ)
    with pytest.raises(UserInputError, match=message):
        StreamSession(config)


def test_a_closed_session_says_so_and_does_not_stream_on(folder: Path) -> None:
    session = StreamSession(StreamConfig.of(folder))
    stream = session.stream("red circle")
    next(stream)
    session.close()
    with pytest.raises(UserInputError, match="this session is closed; open a new one"):
        next(stream)
    with pytest.raises(UserInputError, match="this session is closed; open a new one"):
        session.stream("red circle")
    with pytest.raises(UserInputError, match="this session is closed; open a new one"):
        session.prompt("blue square")


def test_a_prompt_is_encoded_twice_however_often_it_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = WordTextEncoder.__call__

    def noting(encoder: WordTextEncoder, prompts: Sequence[str]) -> Tensor:
        encoded.extend(prompts)
        embeds: Tensor = encode(encoder, prompts)
        return embeds

    monkeypatch.setattr(WordTextEncoder, "__call__", noting)
    events = [ScheduledEvent(chunk_index=1, prompt="blue square")]
    with StreamSession(StreamConfig.of(folder)) as session:
        list(session.stream("red circle", num_chunks=2, schedule=events))
        session.prompt("red circle")
        list(session.stream("blue square", num_chunks=1))
    assert encoded == 2 * ["red circle"] + 2 * ["blue square"]


def test_the_model_folder_is_read_once_by_a_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    read = ModelFolder.open

    def noting(name: str | Path, recipe: str | None) -> ModelFolder:
        opened.append(name)
        return read(name, recipe)

    monkeypatch.setattr(ModelFolder, "open", noting)
    setup = StreamSetup.of(StreamConfig.of(folder))
    with StreamSession(setup) as session:
        assert session.setup is setup
        list(session.stream("red circle", num_chunks=2))
    assert opened == [str(folder)]
