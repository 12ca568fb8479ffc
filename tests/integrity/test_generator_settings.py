"""What a generator computes by and no digest covers is the same all along."""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import pytest

from scope_contracts.errors import IntegrityError
from scope_rt.checks import Checks
from scope_rt.control.chunk import Chunk
from scope_rt.faults import FaultPoint
from scope_rt.integrity.generator_settings import generator_settings
from scope_rt.models.generator import ChunkGenerator
from tests.integrity.audited import nothing
from tests.integrity.corruption import Change
from tests.integrity.rank0_streams import shown_with
from tests.tiny_models import Rollout

AT = 3
CHANGES: dict[str, object] = {
    "schedule.shift": 5.1,
    "schedule.num_train_timesteps": 999,
    "model.config.eps": 1e-5,
    "model.config.num_attention_heads": 3,
    "cache.spec.sink_frames": 2,
    "cache.spec.window_frames": 5,
    "recaches": True,
}


def written(name: str) -> Callable[[ChunkGenerator], None]:
    """Where it lies, as a memory error does: these are frozen."""
    *path, last = name.split(".")

    def write(generator: ChunkGenerator) -> None:
        owner = attrgetter(".".join(path))(generator) if path else generator
        object.__setattr__(owner, last, CHANGES[name])

    return write


@pytest.mark.parametrize("name", CHANGES)
def test_each_is_among_the_settings(name: str) -> None:
    generator = Rollout(sink=1, window=4).generator
    generator.model.config = replace(generator.model.config)  # other tests have the same
    settings = generator_settings(generator)
    before = settings()
    written(name)(generator)
    after = [now for was, now in zip(before, settings(), strict=True) if was != now]
    assert after == [f"{name}={CHANGES[name]}"]


@pytest.mark.parametrize("level", ["default", "strict"])
def test_a_schedule_that_changes_in_memory_shows_no_chunk(level: str) -> None:
    shown: list[Chunk] = []
    change = Change(FaultPoint.GENERATOR, AT, written("schedule.shift"))
    with pytest.raises(IntegrityError, match=rf"chunk {AT}[:,] rank 0"):
        shown_with(change, shown=shown, integrity=level)
    assert len(shown) == AT


def test_without_the_check_of_settings_default_shows_it() -> None:
    change = Change(FaultPoint.GENERATOR, AT, written("schedule.shift"))
    checks = replace(Checks(), numerics=nothing)
    assert len(shown_with(change, checks=checks, integrity="default")) > AT
