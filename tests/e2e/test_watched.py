"""Whatever computes while a stream runs is watched: where it hangs, somebody is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scope_contracts.envelope import LATENTS_OUT, PlanId, PPResult
from scope_rt.config import StreamConfig
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.instruments import Instruments
from scope_rt.integrity.pictures import PictureCheck
from scope_rt.integrity.verifier import Verifier
from scope_rt.mesh.full_pipeline import FullPipeline
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.noise import SeededNoise
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_rt.text.words import WordTextEncoder
from scope_rt.vae.tiny import TinyStreamingDecoder
from scope_rt.watchdog import Watchdog
from tests.tiny_folder import write_tiny_folder

COMPUTING = {
    "a prompt is encoded": (WordTextEncoder, "__call__"),
    "a chunk is generated": (ChunkGenerator, "generate"),
    "it is verified": (Verifier, "end"),
    "all that is held is verified": (Verifier, "close"),
    "a chunk is decoded": (TinyStreamingDecoder, "decode"),
    "its picture is verified": (PictureCheck, "verify"),
    "the codec is verified": (PictureCheck, "close"),
}


def noting(real: Callable[..., Any], watchdog: Watchdog, watched: list[bool]) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        watched.append(bool(watchdog._sections))
        return real(*args, **named)

    return call


@pytest.mark.parametrize("what", COMPUTING)
def test_what_computes_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    owner, name = COMPUTING[what]
    watchdog, watched = Watchdog(), list[bool]()
    prompt = ScheduledEvent(chunk_index=1, prompt="a blue square")
    config = StreamConfig.of(write_tiny_folder(tmp_path), integrity="strict")
    with StreamSession(config, instruments=Instruments(watchdog=watchdog)) as session:
        monkeypatch.setattr(owner, name, noting(getattr(owner, name), watchdog, watched))
        list(session.stream("a red circle", num_chunks=2, schedule=[prompt]))
    assert watched
    assert all(watched)


def test_what_a_follower_of_tp_v0_decodes_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = StreamSetup.of(StreamConfig.of(write_tiny_folder(tmp_path), plan=PlanId.SINGLE))
    watchdog, watched = Watchdog(), list[bool]()
    pipeline = FullPipeline(
        noise=SeededNoise(),
        decoder=setup.decoder(),
        context=setup.context_memory(),
        watchdog=watchdog,
    )
    monkeypatch.setattr(
        TinyStreamingDecoder, "decode", noting(TinyStreamingDecoder.decode, watchdog, watched)
    )
    result = PPResult(
        call_id=0, chunk_index=0, cache_epoch=0, observed_generator_calls=1, tensors=(), stage_ms=()
    )
    latents = torch.randn(setup.geometry.latent_shape(setup.height, setup.width))
    pipeline.remember(result, {LATENTS_OUT: latents})
    assert watched == [True]
