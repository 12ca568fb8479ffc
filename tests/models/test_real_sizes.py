"""Models of real sizes run without weights: on torch's device `meta`, where reading a number
raises, so that nothing of a chunk waits for a device or looks at what it computed."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from scope_contracts.envelope import CONDITIONING_EMBEDS, CONTEXT_FRAMES_OVERRIDE, LATENTS_IN
from scope_rt.attention.backend import backend_named
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.lone_chunk import lone_envelope
from scope_rt.models.noise import SeededNoise
from scope_rt.models.schedule import FlowSchedule
from scope_rt.tensor_digests import NoDigests
from scope_rt.vae.wan_config import WanVaeConfig
from scope_runners.plan_memory.model_size import WanSize
from scope_runners.plan_memory.video import VideoRequirement
from tests.runners.plan_memory.plan_requests import required_of_video

META = torch.device("meta")
STEPS = (1000.0, 750.0, 500.0, 250.0)


class Group:
    """The first place of a group; a sum has the shape of its parts."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.num_sums = 0, size, 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        self.num_sums += 1
        return tensor


def sizes_of(requirement: VideoRequirement) -> CausalWanConfig:
    size = requirement.size
    return CausalWanConfig(**{each.name: getattr(size, each.name) for each in fields(WanSize)})


SIZES = [("wan-1.3b", 1_418_996_800), ("krea-14b", 14_288_491_584)]


@pytest.mark.parametrize(("name", "num_weights"), SIZES)
@pytest.mark.parametrize("tp", [1, 4, 6])  # 6 ranks have 7 heads of 40, and the last one zeros
def test_ranks_of_real_sizes_hold_what_plan_memory_says(
    name: str, num_weights: int, tp: int
) -> None:
    requirement = required_of_video(f"--model {name} --tp {tp} --dtype bfloat16 --plan pp0")
    config, plan = sizes_of(requirement), requirement.plan()
    with META:
        whole, model = CausalWanModel(config), CausalWanModel(config, Group(tp))
    cache = open_frame_cache(requirement.shared_spec, device=META, group=Group(tp))
    assert sum(weight.numel() for weight in whole.parameters()) == num_weights
    of_rank = sum(weight.nbytes for weight in model.to(torch.bfloat16).parameters())
    assert of_rank == plan.bytes_of("weights")
    assert cache.num_bytes == plan.bytes_of("cache")


@pytest.mark.parametrize("name", [name for name, _ in SIZES])
def test_a_chunk_of_real_size_reads_no_number_that_it_computed(name: str) -> None:
    """Two layers of each: all are alike, and an operator takes a millisecond here."""
    layers, tp = 2, 4
    whole = required_of_video(f"--model {name} --tp {tp} --dtype bfloat16 --plan pp0")
    requirement = replace(
        whole,
        size=replace(whole.size, num_layers=layers),
        spec=replace(whole.spec, num_layers=layers),
    )
    config, group = sizes_of(requirement), Group(tp)
    with META:
        model = CausalWanModel(config, group).to(torch.bfloat16)
    generator = ChunkGenerator(
        model=model,
        cache=open_frame_cache(requirement.spec, device=META, group=group),
        schedule=FlowSchedule(),
        backend=backend_named("sdpa"),
        noise=SeededNoise(),
        derived=NoDigests(),
    )
    shape = (1, 3, config.in_channels, 60, 104)
    tensors = {
        LATENTS_IN: torch.zeros(shape, dtype=torch.bfloat16),
        CONDITIONING_EMBEDS: torch.zeros(1, 512, config.text_dim, dtype=torch.bfloat16),
        CONTEXT_FRAMES_OVERRIDE: torch.zeros(shape, dtype=torch.bfloat16),
    }
    calls: list[None] = []
    for index, recomputes in enumerate((False, True)):
        envelope = lone_envelope(
            index,
            STEPS,
            frames_per_block=3,
            height=480,
            width=832,
            clean_pass=not recomputes,
            recomputes=recomputes,
            bias=0.5,
        )
        latents = generator.generate(envelope, tensors, lambda: calls.append(None))
        assert (latents.device, latents.shape) == (META, shape)
    assert len(calls) == 2 * (len(STEPS) + 1)
    text = [part for kv in generator.text for part in (kv.k, kv.v)]
    held = sum(part.nbytes for part in text)
    assert held == requirement.plan().bytes_of("text keys and values")
    # Five a layer and call, and one a layer for the text.
    assert group.num_sums == layers * (5 * len(calls) + 1)
    with pytest.raises((RuntimeError, NotImplementedError)):
        latents.cpu()  # nor could it have


def test_a_resume_point_of_real_size_takes_less_than_10_mb() -> None:
    """Krea's, which has most latents: the decoder's 38 frames and the context behind them."""
    codec = WanVaeConfig(
        base_dim=96,
        z_dim=16,
        dim_mult=(1, 2, 4, 4),
        num_res_blocks=2,
        temperal_downsample=(False, True, True),
        latents_mean=(0.0,) * 16,
        latents_std=(1.0,) * 16,
    ).sizes
    num_frames = codec.decoder_context_frames + 3 + 2 * 3  # and two chunks that nobody holds yet
    latents = torch.empty(1, num_frames, 16, 60, 104, dtype=torch.bfloat16, device=META)
    embeds = torch.empty(1, 40, 4096, dtype=torch.bfloat16, device=META)  # rows of a prompt's own
    assert latents.nbytes + embeds.nbytes < 10e6
