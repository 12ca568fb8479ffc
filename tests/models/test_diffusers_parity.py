"""One forward of our class equals diffusers' WanTransformer3DModel on the same random weights."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from scope_rt.collectives import SoloCollectives
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.loading import build_transformer
from scope_rt.models.rope import rotations
from tests.rounding import DIFFUSERS_CONTRACT
from tests.tiny_models import CONFIG, CPU

pytestmark = pytest.mark.numeric

FRAMES, SIDE = 5, 12


def bidirectional(layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTHD, v_BTHD))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def test_forward_equals_diffusers_on_random_weights(tmp_path: Path) -> None:
    from diffusers import WanTransformer3DModel  # seconds, for this test alone

    torch.manual_seed(0)
    sizes = {k: v for k, v in json.loads(CONFIG.to_json()).items() if k != "_class_name"}
    theirs = WanTransformer3DModel(**sizes | {"patch_size": (1, 2, 2)}).eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.5 if p.ndim == 1 else 0.1)
    latents = torch.randn(2, CONFIG.in_channels, FRAMES, SIDE, SIDE)
    text = torch.randn(2, 7, CONFIG.text_dim)
    timestep = torch.tensor([937.5, 250.0])
    mine = build_transformer(
        CONFIG, theirs.state_dict(), SoloCollectives(), dtype=torch.float32, device=CPU
    )
    with torch.no_grad():
        want = theirs(latents, timestep, text).sample
        got = mine(
            latents.transpose(1, 2),
            modulation=mine.modulation(timestep[:, None]),
            rope=rotations(
                range(FRAMES),
                grid=(SIDE // 2, SIDE // 2),
                head_dim=CONFIG.attention_head_dim,
                dtype=torch.complex64,
            ),
            text=mine.text_kv(text[:, None]),
            attend=bidirectional,
        ).transpose(1, 2)
    assert want.std() > 0.1
    assert (got - want).abs().max() <= DIFFUSERS_CONTRACT


def test_config_written_here_reads_back_as_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG.to_json())
    assert CausalWanConfig.from_folder(tmp_path) == CONFIG
