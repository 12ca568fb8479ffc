"""A stream that begins with a picture: chunk 0 is its latents, and all goes on from there."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from scope_contracts.errors import UserInputError
from scope_contracts.retraction import Retraction
from scope_rt import recovery
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.log_entries import retracted_record
from scope_rt.control.saved_points import SavedResumePoints
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.models.family import Family
from scope_rt.models.recipe_choices import NewText
from scope_rt.record.reader import read_history, read_progress
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_rt.tensors import bytes_of
from scope_rt.vae.codec import num_frames
from tests.e2e import start_frame_by_hand as by_hand
from tests.real_checkpoints import FASTVIDEO, NEEDS_WAN
from tests.record.killed import Report, lives
from tests.tiny_folder import FRAMEWISE_RECIPE, write_tiny_folder

NUM_CHUNKS = 7
PROMPT, SECOND = "a red circle", "a blue square"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("framewise"), FRAMEWISE_RECIPE)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return painted(tmp_path_factory.mktemp("picture") / "start.png", seed=0)


def painted(path: Path, *, seed: int) -> Path:
    small = np.random.default_rng(seed).integers(0, 256, (4, 10, 3), dtype=np.uint8)
    Image.fromarray(small).resize((100, 40), Image.Resampling.BICUBIC).save(path)
    return path


def chunks(
    folder: Path, *events: ScheduledEvent, num_chunks: int = NUM_CHUNKS, **settings: Any
) -> Sequence[Chunk]:
    """Streamed with every check there is, unless `settings` say otherwise."""
    config = StreamConfig.of(folder, **{"seed": 5, "integrity": "strict"} | settings)
    with StreamSession(config) as session:
        return list(session.stream(PROMPT, num_chunks=num_chunks, schedule=events))


def digests(stream: Sequence[Chunk]) -> list[str]:
    return [chunk.latents_sha256 for chunk in stream]


def test_chunk_0_is_the_picture_as_the_codec_shows_it(folder: Path, picture: Path) -> None:
    config = StreamConfig.of(folder, seed=5, image=picture)
    setup = StreamSetup.of(config)
    first = chunks(folder, image=picture, num_chunks=1)[0]
    assert torch.equal(first.latents[None], setup.start_frame.latents)
    again = setup.codec.streaming_decoder().decode(setup.start_frame.latents)[0]
    assert torch.equal(torch.as_tensor(first.frames), again)
    assert len(first.frames) == num_frames(setup.codec, 1, starts_epoch=True)
    assert first.generator_calls == 1


def test_steps_of_the_first_chunk_are_those_of_the_chunk_after_the_picture(
    folder: Path, picture: Path
) -> None:
    """As in Causal-Forcing's own code, which counts the blocks that it denoises."""
    cut = ScheduledEvent(chunk_index=4, hard_cut=True)
    got = chunks(folder, cut, image=picture)
    assert [chunk.generator_calls for chunk in got] == [1, 4, 3, 3, 4, 3, 3]
    assert [chunk.generator_calls for chunk in chunks(folder, cut)] == [4, 3, 3, 3, 4, 3, 3]


def test_the_stream_goes_on_from_the_picture_until_a_hard_cut(folder: Path, picture: Path) -> None:
    cut = ScheduledEvent(chunk_index=4, hard_cut=True)
    with_picture = chunks(folder, cut, image=picture)
    other = chunks(folder, cut, image=painted(picture.with_name("other.png"), seed=1))
    noise = chunks(folder, cut)
    for a, b, c in zip(with_picture[:4], other[:4], noise[:4], strict=True):
        assert len({a.latents_sha256, b.latents_sha256, c.latents_sha256}) == 3
    assert digests(with_picture)[4:] == digests(other)[4:] == digests(noise)[4:]


@pytest.mark.parametrize(
    ("level", "kind"),
    [
        pytest.param(
            level, kind, marks=[] if level == "strict" or kind == "ring" else pytest.mark.lab
        )
        for level in ("off", "default", "strict")
        for kind in ("ring", "paged", "quantized", "h2o", "hierarchical")
    ],
)
def test_every_cache_takes_it_under_every_level_of_checks(
    folder: Path, picture: Path, kind: str, level: str
) -> None:
    got = chunks(folder, image=picture, kv_cache=kind, integrity=level)
    assert len(got) == NUM_CHUNKS
    assert got[0].latents_sha256 == chunks(folder, image=picture, num_chunks=1)[0].latents_sha256


def test_the_picture_s_keys_are_made_under_the_prompt_of_chunk_0(
    folder: Path, picture: Path
) -> None:
    config = StreamConfig.of(folder, seed=5, integrity="strict", image=picture)
    with StreamSession(config) as session:
        stream = session.stream(PROMPT, num_chunks=NUM_CHUNKS)
        session.prompt(SECOND)  # before any chunk is planned
        at_0 = list(stream)
    at_1 = chunks(folder, ScheduledEvent(chunk_index=1, prompt=SECOND), image=picture)
    assert [chunk.prompt for chunk in at_0[:2]] == [SECOND, SECOND]
    assert [chunk.prompt for chunk in at_1[:2]] == [PROMPT, SECOND]
    assert digests(at_0)[0] == digests(at_1)[0]
    assert digests(at_0)[1] != digests(at_1)[1]


def test_a_model_that_re_caches_makes_the_picture_s_keys_again(
    tmp_path: Path, picture: Path
) -> None:
    recaching = replace(FRAMEWISE_RECIPE, new_text=NewText.RECACHE)
    folder = write_tiny_folder(tmp_path / "model", recaching)
    got = chunks(folder, ScheduledEvent(chunk_index=1, prompt=SECOND), image=picture)
    assert [chunk.generator_calls for chunk in got[:3]] == [1, 5, 3]


def test_a_second_stream_of_a_session_begins_with_noise(folder: Path, picture: Path) -> None:
    config = StreamConfig.of(folder, seed=5, integrity="strict", image=picture)
    with StreamSession(config) as session:
        assert [c.generator_calls for c in session.stream(PROMPT, num_chunks=2)] == [1, 4]
        assert [c.generator_calls for c in session.stream(PROMPT, num_chunks=2)] == [4, 3]


def kept(folder: Path, place: Path, **settings: Any) -> StreamConfig:
    given = {"seed": 5, "log": place / "log", "snapshot": place / "snapshot"}
    return StreamConfig.of(folder, **given | {"integrity": "strict"} | settings)


def lost_after(config: StreamConfig, num_chunks: int) -> list[Chunk]:
    """A stream that ends without a word."""
    session, shown = StreamSession(config), list[Chunk]()
    stream = session.stream(PROMPT, num_chunks=NUM_CHUNKS, acknowledged=lambda: len(shown))
    for _ in range(num_chunks):
        shown.append(next(stream))
    session.log.close()
    return shown


def edited(path: Path) -> None:
    painted(path, seed=1)


def kept_as_it_is(path: Path) -> None: ...


@pytest.mark.parametrize(
    ("num_shown", "change"),
    [(1, kept_as_it_is), (2, edited), (5, Path.unlink)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_resumed_stream_equals_one_that_rebuilds_its_cache_there(
    folder: Path, tmp_path: Path, num_shown: int, change: Callable[[Path], None]
) -> None:
    picture = painted(tmp_path / "start.png", seed=0)
    rebuild = ScheduledEvent(chunk_index=num_shown, recompute=True)
    want = digests(chunks(folder, rebuild, image=picture))
    shown = lost_after(kept(folder, tmp_path, image=picture), num_shown)
    change(picture)
    with StreamSession(kept(folder, tmp_path, image=picture, resume=True)) as session:
        rest = list(session.stream("none", num_chunks=NUM_CHUNKS, acknowledged=lambda: len(shown)))
    assert digests([*shown, *rest]) == want
    history = read_history(tmp_path / "log")
    assert [chunk.latents_sha256 for chunk in history.finished.values()] == want


@pytest.mark.parametrize("found", [{"attempt": 1}, {"run_id": "night"}], ids=str)
def test_a_start_that_may_resume_a_stream_does_not_ask_for_its_picture(
    folder: Path, tmp_path: Path, found: dict[str, Any]
) -> None:
    config = StreamConfig.of(folder, plan="pp0", image=tmp_path / "gone.png")
    started = LaunchEnvironment(launched=True, world_size=2)
    with pytest.raises(UserInputError, match=r"gone\.png: cannot be read \(No such file"):
        StreamSetup.of(config, started)
    setup = StreamSetup.of(config, replace(started, **found))
    with pytest.raises(UserInputError, match=r"gone\.png: cannot be read \(No such file"):
        _ = setup.start_frame


def retracted_at_the_picture(folder: Path, place: Path, picture: Path) -> None:
    """Leave a stream that makes chunk 0 again."""
    session = StreamSession(kept(folder, place, image=picture))
    next(session.stream(PROMPT, num_chunks=NUM_CHUNKS, acknowledged=lambda: 0))
    reason = Retraction(first_chunk=0, last_chunk=0, first_epoch=0, last_epoch=0, reason="a test")
    session.log.append(retracted_record(reason))
    session.log.close()


def test_a_picture_that_is_gone_is_shown_again_after_its_retraction(
    folder: Path, tmp_path: Path
) -> None:
    picture = painted(tmp_path / "start.png", seed=0)
    want = digests(chunks(folder, image=picture, num_chunks=1))
    retracted_at_the_picture(folder, tmp_path, picture)
    picture.unlink()
    with StreamSession(kept(folder, tmp_path, image=picture, resume=True)) as session:
        again = list(session.stream("none", num_chunks=1, acknowledged=lambda: 0))
    assert digests(again) == want
    assert [chunk.cache_epoch for chunk in again] == [1]


def test_a_start_frame_that_is_damaged_in_the_log_is_never_shown(
    folder: Path, tmp_path: Path
) -> None:
    picture = painted(tmp_path / "start.png", seed=0)
    retracted_at_the_picture(folder, tmp_path, picture)
    latents = bytes(
        bytes_of(StreamSetup.of(kept(folder, tmp_path, image=picture)).start_frame.latents)
    )
    data = bytearray((tmp_path / "log").read_bytes())
    data[data.index(latents) + 5] ^= 1
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(UserInputError, match=r"log: the start frame is damaged \(byte \d+: .*anew"):
        StreamSession(kept(folder, tmp_path, image=picture, resume=True))


def test_a_start_frame_that_changed_before_it_was_logged_is_never_shown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = painted(tmp_path / "start.png", seed=0)
    monkeypatch.setattr(recovery, "bytes_of", lambda latents: bytes_of(latents + 1e-3))
    retracted_at_the_picture(folder, tmp_path, picture)
    with pytest.raises(UserInputError, match=r"is damaged \(its latents changed before"):
        StreamSession(kept(folder, tmp_path, image=picture, resume=True))


def stream_or_resume(life: Path, report: Report) -> None:
    """Three chunks of a stream that begins with `start.png`, from where they are left."""
    resumes = (life / "snapshot").exists()
    image = life / "start.png" if resumes else painted(life / "start.png", seed=0)
    config = kept(life.parent.parent / "model", life, image=image, resume=resumes or None)
    num_held = len(read_progress(life / "log").shown)
    with StreamSession(config) as session:
        for chunk in session.stream(PROMPT, num_chunks=3, acknowledged=lambda: num_held):
            report(f"{chunk.chunk_index}:{chunk.latents_sha256}")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("step", [12, pytest.param(1, marks=pytest.mark.lab)])
def test_a_kill_at_any_change_of_the_disk_loses_no_picture_that_was_shown(
    tmp_path: Path, step: int
) -> None:
    """Where anything was shown the file is gone before the stream is resumed."""
    write_tiny_folder(tmp_path / "model", FRAMEWISE_RECIPE)
    picture = painted(tmp_path / "start.png", seed=0)
    (start,) = digests(chunks(tmp_path / "model", image=picture, num_chunks=1))
    num_resumed = 0
    for life, shown in lives(stream_or_resume, tmp_path / "lives", step=step):
        assert not shown or shown[0] == f"0:{start}"
        if SnapshotStore(life / "snapshot").header() is None:
            assert not shown, "what is shown can be resumed"
            continue
        (life / "start.png").unlink()
        again = list[str]()
        stream_or_resume(life, again.append)
        assert shown or again[0] == f"0:{start}"
        assert len({word.split(":")[0] for word in [*shown, *again]}) == 3
        num_resumed += 1
    assert num_resumed > 20 / step


def test_a_stream_is_not_resumed_with_another_picture_or_none(
    folder: Path, picture: Path, tmp_path: Path
) -> None:
    lost_after(kept(folder, tmp_path, image=picture), 2)
    other = painted(tmp_path / "other.png", seed=1)
    with pytest.raises(
        UserInputError, match=r"with image \S+/start.png, this one has \S+/other.pn"
    ):
        StreamSession(kept(folder, tmp_path, image=other, resume=True))
    with pytest.raises(UserInputError, match=r"with image \S+/start.png, this one has none;"):
        StreamSession(kept(folder, tmp_path, resume=True))
    other.write_bytes(picture.read_bytes())  # as where it was moved
    with StreamSession(kept(folder, tmp_path, image=other, resume=True)) as session:
        assert session.resumed_at_chunk == 2
    lost_after(kept(folder, tmp_path / "noise"), 2)
    with pytest.raises(UserInputError, match=r"with image none, this one has \S+/start.png;"):
        StreamSession(kept(folder, tmp_path / "noise", image=picture, resume=True))


def test_the_log_says_which_picture_it_was(folder: Path, picture: Path, tmp_path: Path) -> None:
    lost_after(kept(folder, tmp_path, image=picture), 2)
    told = read_history(tmp_path / "log").start_frame
    assert told is not None
    setup = StreamSetup.of(kept(folder, tmp_path, image=picture))
    start = setup.start_frame
    assert (told.image, told.image_sha256) == (str(picture), setup.picture.sha256)
    assert told.latents_sha256 == start.latents_sha256


def own_file(recipe: str, folder: Path) -> str:
    """A file of one's own, which is taken at its word whatever the model folder says."""
    path = folder / "mine.toml"
    path.write_text(Family.named(recipe).to_toml())
    return str(path)


@pytest.mark.parametrize("recipe", ["krea-14b", "causal-forcing-chunk-1.3b", None])
def test_other_recipes_refuse_a_picture_by_their_name(
    picture: Path, tmp_path: Path, recipe: str | None
) -> None:
    given = None if recipe is None else own_file(recipe, tmp_path)
    with pytest.raises(UserInputError) as refused:
        StreamSetup.of(StreamConfig.of(FASTVIDEO, recipe=given, image=picture))
    name = given or "fastvideo-1.3b"
    assert f"image {picture}: recipe {name} begins with noise" in str(refused.value)
    assert "takes one: causal-forcing-1.3b, causal-forcing-1step-1.3b" in str(refused.value)


@NEEDS_WAN
def test_the_latents_are_those_of_diffusers_pieces_put_together_by_hand(
    picture: Path, tmp_path: Path
) -> None:
    config = StreamConfig.of(
        FASTVIDEO,
        recipe=own_file("causal-forcing-2step-1.3b", tmp_path),
        seed=5,
        height=48,
        width=80,
        image=picture,
        integrity="strict",
    )
    setup = StreamSetup.of(config)
    with StreamSession(setup) as session:
        got = list(session.stream(PROMPT, num_chunks=5))
        text = setup.conditioning(PROMPT).embeds
    pixels = torch.from_numpy(setup.picture.rgb_HWC)
    first = by_hand.latents_of_picture(FASTVIDEO / "vae", pixels)
    steps = [(1000, 750, 500, 250), (1000, 500), (1000, 500), (1000, 500)]
    want = by_hand.rollout(FASTVIDEO / "transformer", first, text, steps, seed=5)
    latents = torch.cat([chunk.latents for chunk in got])[None]
    assert want.std() > 0.1
    assert (latents - want).abs().max() <= 1e-4


def out_of_memory(*arguments: object, **options: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("resume", [None, False])
def test_a_run_of_the_same_name_with_another_picture_takes_its_own(
    folder: Path,
    picture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    resume: bool | None,
) -> None:
    other = painted(tmp_path / "other.png", seed=1)
    place: dict[str, Any] = {"log": tmp_path / "log", "snapshot": tmp_path / "snapshot"}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "my-stream")
    with monkeypatch.context() as patch:  # an earlier one was lost before its first resume point
        patch.setattr(SavedResumePoints, "begin", out_of_memory)
        with pytest.raises(MemoryError):
            chunks(folder, image=picture, **place)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    got = chunks(folder, image=other, resume=resume, **place)
    monkeypatch.undo()
    assert digests(got) == digests(chunks(folder, image=other))


def test_a_picture_is_the_same_by_its_absolute_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    for place, seed in ((home, 0), (away, 1)):
        place.mkdir()
        painted(place / "a.png", seed=seed)
    monkeypatch.chdir(home)
    lost_after(kept(folder, tmp_path, image=Path("a.png")), 2)
    monkeypatch.chdir(away)
    with pytest.raises(UserInputError, match=r"with image \S+/home/a.png, this .*/away/a.png;"):
        StreamSession(kept(folder, tmp_path, image=Path("a.png"), resume=True))
    (home / "a.png").unlink()
    again = Path("..", "home", "a.png")
    with StreamSession(kept(folder, tmp_path, image=again, resume=True)) as session:
        assert session.resumed_at_chunk == 2
