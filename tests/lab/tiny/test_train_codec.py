"""The encoder is solved, not learned, and a resumed run is the same run."""

from pathlib import Path

import pytest
import torch

from scope_lab.tiny import train_codec
from scope_lab.tiny.train_codec import Trainer, fit_encoder
from scope_lab.tiny.world import sample_clips
from scope_rt.vae.tiny import TinyCodecConfig, TinyVideoCodec

pytestmark = pytest.mark.lab

SMALL = TinyCodecConfig(wide_channels=16, narrow_channels=4, num_blocks=1)


def test_fitted_latents_have_unit_variance_and_the_guess_already_shows_the_picture() -> None:
    torch.manual_seed(0)
    codec = TinyVideoCodec(SMALL)
    kept = fit_encoder(codec, torch.Generator().manual_seed(0), 200)
    video = sample_clips(16, 24, torch.Generator().manual_seed(1), 0.3).video_BTCHW
    latents = codec.encode(video)
    assert kept > 0.9
    assert float(latents.var(dim=(0, 1, 3, 4)).mean()) == pytest.approx(1.0, abs=0.15)
    with torch.inference_mode():
        error = (codec.decode(latents) - video).square().mean()
    assert float(error) < 0.08 * float(video.var())


def test_a_resumed_run_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_codec, "TinyCodecConfig", lambda: SMALL)
    monkeypatch.setattr(train_codec, "FIT_CLIPS", 50)
    monkeypatch.setattr(train_codec, "HELD_OUT_CLIPS", 1)
    whole = Trainer(out=tmp_path / "whole", num_steps=4, seed=0, resume=True)
    for _ in range(4):
        whole.train_step(1)
    halves = Trainer(out=tmp_path / "halves", num_steps=4, seed=0, resume=True)
    for _ in range(2):
        halves.train_step(1)
    halves.save()
    resumed = Trainer(out=tmp_path / "halves", num_steps=4, seed=5, resume=True)
    assert resumed.step == 2
    for _ in range(2):
        resumed.train_step(1)
    for name, weights in whole.codec.state_dict().items():
        assert torch.equal(weights, resumed.codec.state_dict()[name]), name
    assert TinyVideoCodec.from_pretrained(tmp_path / "whole" / "codec").config == SMALL
