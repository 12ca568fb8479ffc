"""A TP degree that leaves a rank idle is refused; heads that do not come out even are filled up."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scope_contracts.cache_spec import CacheChoice
from scope_contracts.errors import UserInputError
from scope_rt.collectives import SoloCollectives
from scope_rt.models.fingerprint import shard_digest
from scope_rt.models.shards import shards_of
from scope_rt.tensor_files.safetensors_file import tensors_of
from scope_rt.tensor_files.stored_tensor import WHOLE, Shard
from tests.tiny_folder import CONFIG

SIX_HEADS = replace(CONFIG, num_attention_heads=6, ffn_dim=320)


def test_a_degree_that_leaves_a_rank_without_a_head_is_refused() -> None:
    with pytest.raises(UserInputError) as refused:
        SIX_HEADS.check_degree(4)
    assert str(refused.value) == (
        "tp 4 does not divide the model's 6 heads and 320 feed-forward channels so that each rank "
        "has some; choose one of 1, 2, 3, 6"
    )


@pytest.mark.parametrize("degree", [2, 3, 6])
def test_a_degree_that_gives_each_rank_some_is_taken(degree: int) -> None:
    SIX_HEADS.check_degree(degree)


@pytest.mark.parametrize(("heads", "degree", "each"), [(5, 2, 3), (5, 3, 2), (12, 4, 3)])
def test_the_last_rank_of_an_uneven_degree_is_filled_up(heads: int, degree: int, each: int) -> None:
    config = replace(CONFIG, num_attention_heads=heads)
    config.check_degree(degree)
    assert config.heads_of_rank(degree) == each
    assert config.cache_heads(degree, CacheChoice.named("ring")) == degree * each


def test_heads_of_zeros_are_refused_where_attention_is_added_up_and_only_there() -> None:
    h2o = CacheChoice.named("h2o")
    assert SIX_HEADS.cache_heads(3, h2o) == 6
    with pytest.raises(UserInputError, match="6 heads are not shared evenly by tp 4; use ring"):
        SIX_HEADS.cache_heads(4, h2o)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("whole", "num_parts", "unit"), [(10, 2, 2), (12, 3, 1), (9, 2, 3)])
def test_parts_are_the_whole_and_zeros_whoever_reads_them(
    tmp_path: Path, axis: int, whole: int, num_parts: int, unit: int
) -> None:
    tensor = torch.randn((whole, 4) if axis == 0 else (4, whole))
    save_file({"w": tensor}, tmp_path / "w.safetensors")
    (stored,) = tensors_of(tmp_path / "w.safetensors")
    shards = [Shard(axis=axis, index=i, num_parts=num_parts, unit=unit) for i in range(num_parts)]
    parts = [shard.of(tensor) for shard in shards]
    assert [part.shape for part in parts] == [parts[0].shape] * num_parts
    assert parts[0].shape[axis] % unit == 0
    together = torch.cat(parts, dim=axis)
    assert torch.equal(together.narrow(axis, 0, whole), tensor)
    assert not together.narrow(axis, whole, together.shape[axis] - whole).any()
    for shard, part in zip(shards, parts, strict=True):
        assert torch.equal(stored.read(shard), part)
    digests = [shard_digest(part, shard) for part, shard in zip(parts, shards, strict=True)]
    assert sum(digests) % 2**64 == shard_digest(tensor, WHOLE)


def test_heads_are_not_cut() -> None:
    class Last(SoloCollectives):
        rank, size = 1, 2

    weight = torch.arange(1.0, 11)[:, None].expand(10, 3)  # 5 heads of 2
    name = "blocks.0.attn1.to_q.weight"
    part = shards_of({name: weight}, Last(), head_dim=2)[name]
    assert part[:, 0].tolist() == [7, 8, 9, 10, 0, 0]
