"""What a recipe chooses is what a stream does, and what its integrity checks expect."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scope_contracts.envelope import RECOMPUTE_EMBEDS
from scope_contracts.errors import IntegrityError, UserInputError
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.models.causal_wan import TextKV
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.recipe import Recipe
from scope_rt.models.recipe_choices import NewText, Positions, RecomputeText, TransitionWeights
from scope_rt.session import StreamSession
from tests.integrity.corruption import Change
from tests.tiny_folder import KREA_RECIPE, RECIPE, write_tiny_folder

FIRST, SECOND = "red circle", "blue square"
AT = 2
"""The chunk of the second prompt."""


def chunks(
    folder: Path, recipe: Recipe, *events: ScheduledEvent, num_chunks: int = 5, **settings: Any
) -> Sequence[Chunk]:
    """Streamed with every check there is: none may object to what the recipe asks for."""
    path = folder / str(len(list(folder.iterdir())))
    write_tiny_folder(path, recipe)
    with StreamSession(StreamConfig.of(path, seed=3, integrity="strict", **settings)) as session:
        return list(session.stream(FIRST, num_chunks=num_chunks, schedule=events))


def resumed_chunks(
    place: Path,
    recipe: Recipe,
    *events: ScheduledEvent,
    lost_after: int,
    num_chunks: int,
    **instruments: Any,
) -> Sequence[Chunk]:
    """What another process makes of a stream that was lost after so many chunks."""
    folder = write_tiny_folder(place / "model", recipe)

    def config(resume: bool | None) -> StreamConfig:
        paths = {"log": place / "log", "snapshot": place / "snapshot"}
        return StreamConfig.of(folder, seed=3, integrity="strict", resume=resume, **paths)

    asked: dict[str, Any] = {"num_chunks": num_chunks, "acknowledged": lambda: lost_after}
    with StreamSession(config(None)) as session:
        stream = session.stream(FIRST, schedule=events, **asked)
        assert [next(stream).chunk_index for _ in range(lost_after)] == list(range(lost_after))
        session.log.close()
    with StreamSession(config(True), instruments=Instruments(**instruments)) as session:
        return list(session.stream("none", **asked))


def are_same(got: Sequence[Chunk], want: Sequence[Chunk]) -> list[bool]:
    return [torch.equal(a.latents, b.latents) for a, b in zip(got, want, strict=True)]


def test_an_epoch_s_first_chunk_has_steps_of_its_own(tmp_path: Path) -> None:
    recipe = replace(RECIPE, first_chunk_steps=(1000.0, 750.0, 500.0, 250.0))
    cut = ScheduledEvent(chunk_index=2, hard_cut=True)
    got = chunks(tmp_path, recipe, cut, num_chunks=4)
    assert [chunk.generator_calls for chunk in got] == [5, 3, 5, 3]


def test_a_last_step_without_noise_is_a_step(tmp_path: Path) -> None:
    got = chunks(tmp_path, replace(KREA_RECIPE, denoising_steps=(1000.0, 500.0, 0.0)))
    assert [chunk.generator_calls for chunk in got] == [3, 4, 4, 4, 4]


def test_a_recompute_runs_under_the_text_that_the_recipe_says(tmp_path: Path) -> None:
    change = ScheduledEvent(chunk_index=AT, prompt=SECOND)
    current = chunks(tmp_path, KREA_RECIPE, change)
    recipe = replace(KREA_RECIPE, recompute_text=RecomputeText.PREVIOUS)
    previous = chunks(tmp_path, recipe, change)
    assert are_same(previous, current) == [True, True, False, False, False]
    assert all(are_same(chunks(tmp_path, recipe), chunks(tmp_path, KREA_RECIPE)))


def test_a_transition_from_its_source_shows_it_once_more(tmp_path: Path) -> None:
    softly = TransitionSpec(num_chunks=2, method=Interpolation.LERP, bias_floor=1.0)
    change = ScheduledEvent(chunk_index=AT, prompt=SECOND, transition=softly)
    recipe = replace(RECIPE, transition_weights=TransitionWeights.FROM_SOURCE)
    got, unchanged = chunks(tmp_path, recipe, change), chunks(tmp_path, RECIPE)
    assert are_same(got, unchanged) == [True, True, True, False, False]
    late = ScheduledEvent(chunk_index=AT + 1, prompt=SECOND)
    assert all(are_same(got, chunks(tmp_path, RECIPE, late)))
    assert are_same(chunks(tmp_path, RECIPE, change), unchanged)[AT] is False


RECACHING = replace(RECIPE, new_text=NewText.RECACHE)


def test_a_new_text_makes_the_latest_frames_again_where_they_lie(tmp_path: Path) -> None:
    change = ScheduledEvent(chunk_index=AT, prompt=SECOND)
    late = ScheduledEvent(chunk_index=4, prompt=FIRST)
    got = chunks(tmp_path, RECACHING, change, late, num_chunks=6)
    assert [chunk.generator_calls for chunk in got] == [3, 3, 4, 3, 4, 3]
    kept = chunks(tmp_path, RECIPE, change, late, num_chunks=6)
    assert are_same(got, kept) == [True, True, False, False, False, False]
    assert all(are_same(chunks(tmp_path, RECACHING), chunks(tmp_path, RECIPE)))


@pytest.mark.parametrize("kind", ["paged", "quantized"])
def test_other_caches_are_made_again_where_they_lie_too(tmp_path: Path, kind: str) -> None:
    change = ScheduledEvent(chunk_index=AT, prompt=SECOND)
    ring = chunks(tmp_path, RECACHING, change)
    other = chunks(tmp_path, RECACHING, change, kv_cache=kind)
    assert are_same(ring, other) == [kind == "paged" or index == 0 for index in range(5)]


@pytest.mark.parametrize("kind", ["h2o", "hierarchical"])
def test_a_cache_that_chooses_its_frames_cannot_be_made_again(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UserInputError, match="makes its latest frames again"):
        chunks(tmp_path, RECACHING, kv_cache=kind)


def test_a_resumed_stream_rebuilds_its_cache_and_re_caches_from_then_on(tmp_path: Path) -> None:
    events = [
        ScheduledEvent(chunk_index=1, prompt=SECOND),
        ScheduledEvent(chunk_index=6, prompt=FIRST),
    ]
    rest = resumed_chunks(tmp_path, RECACHING, *events, lost_after=4, num_chunks=8)
    assert [chunk.chunk_index for chunk in rest] == [4, 5, 6, 7]
    assert [chunk.recomputed for chunk in rest] == [True, False, True, False]


@pytest.mark.parametrize("num_chunks_of_change", [0, 3])
@pytest.mark.parametrize("lost_after", [AT, AT + 1, AT + 2])
def test_a_recompute_after_a_resume_runs_under_the_text_before(
    tmp_path: Path, lost_after: int, num_chunks_of_change: int
) -> None:
    """Such a model rebuilds its cache with every chunk: resumed or not, it shows the same bits."""
    recipe = replace(KREA_RECIPE, recompute_text=RecomputeText.PREVIOUS)
    softly = None
    if num_chunks_of_change:
        softly = TransitionSpec(
            num_chunks=num_chunks_of_change, method=Interpolation.SLERP, bias_floor=0.5
        )
    change = ScheduledEvent(chunk_index=AT, prompt=SECOND, transition=softly)
    want = chunks(tmp_path, recipe, change)
    rest = resumed_chunks(tmp_path, recipe, change, lost_after=lost_after, num_chunks=5)
    assert [chunk.recomputed for chunk in rest] == [True] * (5 - lost_after)
    assert all(are_same(rest, want[lost_after:]))


def _scale(name: str) -> Callable[[Any], Any]:
    def change(planned: tuple[Any, dict[str, torch.Tensor]]) -> Any:
        envelope, tensors = planned
        return envelope, tensors | {name: tensors[name] * 1.02}

    return change


def _make_one_text_wrong(generator: ChunkGenerator) -> None:
    """The first that the stream makes from now on; before it, the fixed chunk's is made."""
    real, made = generator.model.text_kv, list[Sequence[TextKV]]()

    def wrong(text_BGLE: torch.Tensor) -> list[TextKV]:
        made.append(real(text_BGLE))
        factor = 1.01 if len(made) == 2 else 1.0
        return [TextKV(each.k, each.v * factor) for each in made[-1]]

    generator.model.text_kv = wrong  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("point", "change", "said"),
    [
        (FaultPoint.PLANNED, _scale(RECOMPUTE_EMBEDS), "embeddings to be sent changed"),
        (FaultPoint.GENERATOR, _make_one_text_wrong, "text before values of layer 0"),
    ],
)
def test_the_text_before_is_verified_as_any_other(
    tmp_path: Path, point: FaultPoint, change: Callable[[Any], Any], said: str
) -> None:
    recipe = replace(KREA_RECIPE, recompute_text=RecomputeText.PREVIOUS)
    event = ScheduledEvent(chunk_index=AT, prompt=SECOND)
    with pytest.raises(IntegrityError, match=rf"chunk {AT}.*{said}"):
        faults = Change(point, AT, change)
        resumed_chunks(tmp_path, recipe, event, lost_after=AT, num_chunks=5, faults=faults)


def test_positions_in_the_window_are_those_in_the_epoch_until_it_rolls(tmp_path: Path) -> None:
    recipe = replace(RECIPE, positions=Positions.IN_WINDOW)
    change = ScheduledEvent(chunk_index=3, recompute=True)
    got = chunks(tmp_path, recipe, change)
    assert are_same(got, chunks(tmp_path, RECIPE, change)) == [True, True, False, False, False]


ROLLING = replace(RECIPE, sink_frames=0, rollout_frames=6, rollout_overlap=3)


def test_a_rollout_begins_anew_with_the_end_of_the_last_one(tmp_path: Path) -> None:
    got = chunks(tmp_path, ROLLING, num_chunks=5)
    assert [chunk.recomputed for chunk in got] == [False, False, True, True, True]
    longer = replace(ROLLING, window_frames=9, rollout_frames=9)
    got = chunks(tmp_path, longer, num_chunks=7)
    assert [chunk.recomputed for chunk in got] == [False, False, False, True, False, True, False]
    kept = chunks(tmp_path, replace(RECIPE, sink_frames=0, window_frames=9), num_chunks=7)
    assert are_same(got, kept) == [True, True, True, False, False, False, False]


@pytest.mark.parametrize("lost_after", [4, 5])
def test_a_rollout_that_is_resumed_in_its_middle_rebuilds_all_of_it(
    tmp_path: Path, lost_after: int
) -> None:
    """A rebuilt cache has other roundings, and no other past."""
    recipe = replace(ROLLING, window_frames=9, rollout_frames=9)
    want = chunks(tmp_path, recipe, num_chunks=8)
    rest = resumed_chunks(tmp_path, recipe, lost_after=lost_after, num_chunks=8)
    for mine, other in zip(rest, want[lost_after:], strict=True):
        assert torch.allclose(mine.latents, other.latents, atol=1e-4)


def test_the_past_weighs_what_the_recipe_says_unless_another_is_asked_for(tmp_path: Path) -> None:
    recipe = replace(RECIPE, kv_cache_attention_bias=0.5)
    got, plain = chunks(tmp_path, recipe, num_chunks=3), chunks(tmp_path, RECIPE, num_chunks=3)
    assert are_same(got, plain) == [True, False, False]
    assert all(are_same(chunks(tmp_path, recipe, num_chunks=3, kv_cache_attention_bias=1.0), plain))
