"""Ranks are ready when they are warm; what they warmed up with is no part of the stream."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scope_rt.config import StreamConfig
from scope_rt.models.chunk_attention import TurnInWindow
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.recipe_choices import Positions
from scope_rt.session import StreamSession
from tests.tiny_folder import KREA_RECIPE, RECIPE, tiny_folder, write_tiny_folder


def streamed(folder: Path, **settings: object) -> list[Tensor]:
    with StreamSession(StreamConfig.of(folder, **settings)) as session:
        return [chunk.latents for chunk in session.stream("a red circle", num_chunks=3)]


@pytest.mark.parametrize("kv_cache", ["ring", "paged:int8", "h2o", "hierarchical"])
def test_a_stream_after_a_warm_up_has_the_same_bits(kv_cache: str) -> None:
    cold = streamed(tiny_folder(), kv_cache=kv_cache, warm_up=False)
    warm = streamed(tiny_folder(), kv_cache=kv_cache, warm_up=True, integrity="strict")
    assert all(map(torch.equal, cold, warm))


def test_a_model_that_rebuilds_its_cache_warms_that_up_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rebuilt = write_tiny_folder(tmp_path / "model", KREA_RECIPE), list[int]()
    recompute = ChunkGenerator._recompute

    def counted(self: ChunkGenerator, context: Tensor, *others: object) -> None:
        rebuilt.append(context.shape[1])
        recompute(self, context, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(ChunkGenerator, "_recompute", counted)
    cold = streamed(folder, warm_up=False)
    in_stream = list(rebuilt)
    warm = streamed(folder, warm_up=True)
    assert all(map(torch.equal, cold, warm))
    assert rebuilt == [*in_stream, KREA_RECIPE.kv_cache_num_frames, *in_stream]


def test_attention_that_turns_queries_and_keys_is_warmed_up_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_window = replace(RECIPE, positions=Positions.IN_WINDOW)
    folder, num_turned = write_tiny_folder(tmp_path / "model", in_window), list[int]()
    turn = TurnInWindow.__call__

    def counted(self: TurnInWindow, *rows: Tensor) -> tuple[Tensor, Tensor]:
        num_turned[-1] += 1
        return turn(self, *rows)

    monkeypatch.setattr(TurnInWindow, "__call__", counted)
    for warms_up in (False, True):
        num_turned.append(0)
        streamed(folder, warm_up=warms_up)
    cold, warm = num_turned
    assert warm > cold


def test_on_a_cpu_nothing_is_warmed_up_unless_somebody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = list[bool]()
    monkeypatch.setattr("scope_rt.mesh.rank.warm_up", lambda *a, **k: called.append(True))
    streamed(tiny_folder())
    assert not called
    streamed(tiny_folder(), warm_up=True)
    assert called
