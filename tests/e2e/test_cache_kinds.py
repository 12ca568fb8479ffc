"""A stream is the stream of its cache: it resumes, and is replayed, on the kind it was made on."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.session import StreamSession
from scope_runners.replay import add_replay_arguments, run_replay
from tests.tiny_folder import KREA_RECIPE, write_tiny_folder

KINDS = ["quantized:int8", "h2o:int8", "paged", "hierarchical"]
NUM_CHUNKS, LOST_AFTER = 8, 5
CUT = ScheduledEvent(chunk_index=7, hard_cut=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


def whole(
    folder: Path,
    kind: str | None,
    *,
    events: Sequence[ScheduledEvent] = (CUT,),
    record: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Chunk]:
    recovery: dict[str, Any] = {} if record is None else {"log": record, "record_latents": True}
    config = StreamConfig.load(
        model=folder, seed=5, kv_cache=kind, environ=environ or {}, **recovery
    )
    with StreamSession(config) as session:
        return list(session.stream("a red circle", num_chunks=NUM_CHUNKS, schedule=events))


def kept_in(place: Path, folder: Path, **settings: Any) -> StreamConfig:
    """A stream with a log and a snapshot in `place`."""
    return StreamConfig.of(folder, log=place / "log", snapshot=place / "snapshot", **settings)


def latents_of(chunks: Sequence[Chunk]) -> list[str]:
    return [chunk.latents_sha256 for chunk in chunks]


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_stream_equals_one_that_rebuilds_its_cache_there(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    config, shown = kept_in(tmp_path, folder, seed=5, kv_cache=kind), list[Chunk]()
    lost = StreamSession(config)
    for chunk in lost.stream("a red circle", num_chunks=NUM_CHUNKS, schedule=[CUT]):
        shown.append(chunk)
        if len(shown) == LOST_AFTER:
            break
    lost.log.close()
    with StreamSession(config.with_settings(resume=True)) as session:
        rest = list(session.stream("none", num_chunks=NUM_CHUNKS, acknowledged=lambda: LOST_AFTER))
    rebuild = ScheduledEvent(chunk_index=LOST_AFTER, recompute=True)
    assert latents_of([*shown, *rest]) == latents_of(whole(folder, kind, events=[CUT, rebuild]))


def test_a_stream_is_not_resumed_on_another_kind_of_cache(folder: Path, tmp_path: Path) -> None:
    lost = StreamSession(kept_in(tmp_path, folder, kv_cache="h2o"))
    next(iter(lost.stream("a red circle")))
    lost.log.close()
    with pytest.raises(UserInputError, match="kv_cache h2o, this one has ring"):
        StreamSession(kept_in(tmp_path, folder, resume=True))


def test_a_replay_runs_on_the_recorded_kind_of_cache(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "a.scope"
    made = whole(folder, "h2o:int8", record=recording)
    assert latents_of(made) != latents_of(whole(folder, "ring"))
    parser = argparse.ArgumentParser()
    add_replay_arguments(parser)
    assert run_replay(parser.parse_args([str(recording)]), []) == 0
    assert capsys.readouterr().out.endswith("result     equal\n")


def test_the_paged_stream_is_the_rings_and_the_variable_chooses_where_no_argument_does(
    folder: Path,
) -> None:
    ring = latents_of(whole(folder, None))
    assert latents_of(whole(folder, "paged")) == ring
    quantized = {"SCOPE_KV_CACHE": "quantized"}
    assert latents_of(whole(folder, None, environ=quantized)) != ring
    assert latents_of(whole(folder, "ring", environ=quantized)) == ring


def test_a_stream_costs_the_bytes_of_its_kind(folder: Path) -> None:
    num_bytes = {}
    for kind in ("ring", "quantized:int8"):
        with StreamSession(StreamConfig.of(folder, kv_cache=kind)) as session:
            worker = session._rank._worker
            assert worker is not None
            num_bytes[kind] = worker._generator.cache.num_bytes
            assert num_bytes[kind] == session.setup.cache_spec.num_bytes(1)
    head_dim = 12
    assert num_bytes["quantized:int8"] * 4 * head_dim == num_bytes["ring"] * (head_dim + 2)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("h2o", "rebuilds its cache .*; use ring, quantized or paged"),
        ("ringg", "want one of ring"),
        ("quantized:int4", "keys dim: got 12, want a multiple of 16; use int8"),
    ],
)
def test_a_kind_that_does_not_suit_the_model_is_refused_in_one_sentence(
    tmp_path: Path, kind: str, remedy: str
) -> None:
    folder = write_tiny_folder(tmp_path, KREA_RECIPE)
    with pytest.raises(UserInputError, match=remedy):
        StreamSession(StreamConfig.of(folder, kv_cache=kind))


@pytest.mark.parametrize("kind", ["quantized:int8", "paged"])
def test_a_model_that_recomputes_its_cache_streams_on_it(tmp_path: Path, kind: str) -> None:
    folder = write_tiny_folder(tmp_path, KREA_RECIPE)
    ring, other = (whole(folder, name) for name in ("ring", kind))
    assert (latents_of(other) == latents_of(ring)) is (kind == "paged")
    worst = max(
        float((a.latents - b.latents).abs().max()) for a, b in zip(ring, other, strict=True)
    )
    assert worst < 0.1
