"""A LoRA is merged into exactly the weights that it names, and refused where it names others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.models.family import LoraPlace
from scope_rt.models.lora import Lora
from scope_rt.tensor_files.stored_tensor import WHOLE, Shard

DIM, RANK = 12, 2
QUERY, UP = "blocks.1.attn1.to_q.weight", "blocks.0.ffn.net.0.proj.weight"
SHAPES: dict[str, tuple[int, ...]] = {
    f"blocks.{block}.{name}": shape
    for block in (0, 1)
    for name, shape in {"attn1.to_q.weight": (DIM, DIM), "ffn.net.0.proj.weight": (24, DIM)}.items()
}
PLACE = LoraPlace(state_dict="generator_lora", rank=RANK, alpha=6.0, all_blocks=False)
PEFT = ("base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight")


def factors(seed: int, num_out: int = DIM) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(RANK, DIM, generator=generator), torch.randn(
        num_out, RANK, generator=generator
    )


def written(path: Path, *, names: tuple[str, str] = PEFT, query: str, up: str) -> Path:
    tensors = {}
    for module, seed, num_out in ((query, 0, DIM), (up, 1, 24)):
        for name, factor in zip(names, factors(seed, num_out), strict=True):
            tensors[name.format(module)] = factor.contiguous()
    save_file(tensors, path)
    return path


def opened(path: Path, key: str = "", place: LoraPlace = PLACE) -> Lora:
    return Lora.open(path, key, place, SHAPES, said_in="mine.toml")


@pytest.mark.parametrize(
    ("names", "query", "up"),
    [
        (PEFT, "blocks.1.self_attn.q", "blocks.0.ffn.0"),
        (PEFT, "model.blocks.1.self_attn.q", "model.blocks.0.ffn.0"),
        (PEFT, "blocks.1.attn1.to_q", "blocks.0.ffn.net.0.proj"),
        (
            (
                "base_model.model.{}.lora_A.default.weight",
                "base_model.model.{}.lora_B.default.weight",
            ),
            "blocks.1.self_attn.q",
            "blocks.0.ffn.0",
        ),
        (
            ("diffusion_model.{}.lora_down.weight", "diffusion_model.{}.lora_up.weight"),
            "blocks.1.self_attn.q",
            "blocks.0.ffn.0",
        ),
        (
            ("lora_unet_{}.lora_down.weight", "lora_unet_{}.lora_up.weight"),
            "blocks_1_self_attn_q",
            "blocks_0_ffn_0",
        ),
    ],
)
def test_every_name_that_people_write_means_its_weight(
    tmp_path: Path, names: tuple[str, str], query: str, up: str
) -> None:
    lora = opened(written(tmp_path / "lora.safetensors", names=names, query=query, up=up))
    assert lora.weights.keys() == {QUERY, UP}
    for name, seed in ((QUERY, 0), (UP, 1)):
        a, b = factors(seed, SHAPES[name][0])
        weight = torch.ones(SHAPES[name])
        got = lora.weights[name].merged(weight.bfloat16(), WHOLE)
        assert torch.allclose(got, weight + 3 * b @ a)
        assert got.dtype is torch.float32


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_are_merged_with_their_share(tmp_path: Path, axis: int) -> None:
    path = written(tmp_path / "l.safetensors", query="blocks.1.self_attn.q", up="blocks.0.ffn.0")
    low_rank = opened(path).weights[UP]
    weight = torch.arange(24.0 * DIM).view(24, DIM)
    shards = [Shard(axis=axis, index=index, num_parts=3) for index in range(3)]
    parts = [low_rank.merged(shard.of(weight), shard) for shard in shards]
    assert torch.allclose(torch.cat(parts, dim=axis), low_rank.merged(weight, WHOLE))


def test_a_file_s_own_alpha_comes_before_the_recipe_s(tmp_path: Path) -> None:
    module, path = "lora_unet_blocks_1_self_attn_q", tmp_path / "lora.safetensors"
    a, b = factors(0)
    names = {f"{module}.lora_down.weight": a, f"{module}.lora_up.weight": b}
    save_file(names | {f"{module}.alpha": torch.tensor(1.0)}, path)
    place = replace(PLACE, rank=64, alpha=64.0)
    assert opened(path, place=place).weights[QUERY].scale == 1 / RANK


def test_one_state_dict_of_a_pt_is_taken_and_not_the_critic_s(tmp_path: Path) -> None:
    a, b = factors(0)
    mine = dict(zip((name.format("blocks.1.self_attn.q") for name in PEFT), (a, b), strict=True))
    path = tmp_path / "lora.pt"
    critic = {name: torch.zeros_like(each) for name, each in mine.items()}
    torch.save({"critic_lora": critic, "generator_lora": mine, "step": 3}, path)
    lora = opened(path, "generator_lora")
    assert torch.allclose(lora.weights[QUERY].merged(torch.zeros(DIM, DIM), WHOLE), 3 * b @ a)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"blocks.9.self_attn.q.lora_A.weight": (2, 12)}, "no layer for blocks.9.self_attn.q"),
        (
            {"blocks.1.self_attn.q.lora_A.weight": (2, 12)},
            "blocks.1.self_attn.q.lora_B.weight is missing beside",
        ),
        (
            {
                "blocks.1.self_attn.q.lora_A.weight": (2, 16),
                "blocks.1.self_attn.q.lora_B.weight": (12, 2),
            },
            r"blocks.1.self_attn.q.lora_A.weight: got '?\[2, 16\]'?, want '?\[2, 12\]",
        ),
        (
            {
                "blocks.1.self_attn.q.lora_A.weight": (4, 12),
                "blocks.1.self_attn.q.lora_B.weight": (12, 4),
            },
            r"blocks.1.self_attn.q.lora_A.weight .*: got 4, want 2, by mine.toml",
        ),
        (
            {
                f"{prefix}.blocks.1.self_attn.q.lora_{side}.weight": shape
                for prefix in ("model", "generator")
                for side, shape in (("A", (2, 12)), ("B", (12, 2)))
            },
            "blocks.1.self_attn.q is a layer that has another LoRA",
        ),
        (
            {
                "blocks.1.self_attn.q.lora_down.weight": (2, 12),
                "blocks.1.self_attn.q.lora_up.weight": (12, 2),
                "blocks.1.self_attn.q.alpha": (2,),
            },
            r"self_attn.q.alpha: got '?\[2\]'?, want '?one number",
        ),
        (
            {
                "blocks.1.self_attn.q.lora_A.weight": (0, 12),
                "blocks.1.self_attn.q.lora_B.weight": (12, 0),
            },
            r"lora_A.weight: got \[0, 12\], want a rank of at least 1",
        ),
        (
            {"blocks.1.self_attn.q.lora_B.weight": (12, 2)},
            "blocks.1.self_attn.q.lora_A.weight is missing beside",
        ),
        (
            {
                "blocks.1.self_attn.q.lora_A.weight": (2, 12),
                "blocks.1.self_attn.q.lora_down.weight": (2, 12),
                "blocks.1.self_attn.q.lora_B.weight": (12, 2),
            },
            "lora_A.weight and .*lora_down.weight are one factor",
        ),
        (
            {
                "blocks.1.self_attn.q.lora_down.weight": (2, 12),
                "blocks.1.self_attn.q.lora_up.weight": (12, 2),
                "blocks.1.self_attn.q.alpha": (),
            },
            "self_attn.q.alpha: got 0.0, want a number above 0",
        ),
        (
            {
                "blocks.1.self_attn.q.lora_A.weight": (2, 12),
                "blocks.1.self_attn.q.lora_B.weight": (12, 2),
                "blocks.0.self_attn.q.alpha": (),
            },
            "blocks.0.self_attn.q.alpha is the alpha of no LoRA",
        ),
        ({"blocks.1.self_attn.q.dora_scale": (12,)}, "dora_scale is no part of a LoRA"),
    ],
)
def test_a_lora_of_another_model_is_refused_by_its_tensor(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], said: str
) -> None:
    path = tmp_path / "lora.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, path)
    with pytest.raises(UserInputError, match=said) as refused:
        opened(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("other", [0, 1])
def test_half_of_a_lora_is_refused_by_the_layer_that_it_lacks(tmp_path: Path, other: int) -> None:
    """All pairs are whole, and one block's query is left out."""
    a, b = factors(0)
    names = [name.format(f"blocks.{other}.self_attn.q") for name in PEFT]
    path = tmp_path / "lora.safetensors"
    save_file(dict(zip(names, (a, b), strict=True)), path)
    whole = replace(PLACE, all_blocks=True)
    want = f"{names[0]} and nothing for the same layer of block {1 - other}; .*all_blocks = false"
    with pytest.raises(UserInputError, match=want) as refused:
        opened(path, place=whole)
    assert str(path) in str(refused.value)
    names += [name.format(f"blocks.{1 - other}.self_attn.q") for name in PEFT]
    save_file({name: (a, b)["lora_B" in name].clone() for name in names}, path)
    assert len(opened(path, place=whole).weights) == 2
