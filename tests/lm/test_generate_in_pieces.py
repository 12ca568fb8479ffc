"""A prompt that `generate()` feeds in pieces is the prompt that it feeds at once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.model_cache import GenerateCache
from tests.lm.paged_batch import BATCH, PROMPTS, Bench, bench, padded
from tests.rounding import FP64_CONTRACT

pytestmark = pytest.mark.numeric

WIDTH = max(map(len, PROMPTS))
IDS, MASK = padded(PROMPTS)
NEW = 4

each_cache = pytest.mark.parametrize("where", ["paged", "contiguous"])


def empty(it: Bench, where: str) -> Any:
    if where == "contiguous":
        return it.contiguous(BATCH)
    store = it.store()
    return PagedCache(store, [store.start() for _ in range(BATCH)])


@each_cache
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("piece", [3, 4, WIDTH - 1])
def test_generate_in_pieces_equals_a_dynamic_cache_in_the_same_pieces(
    where: str, kind: str, piece: int
) -> None:
    it = bench(kind)
    cache = empty(it, where)
    own = GenerateCache(cache, num_layers=it.rows.layers.num_layers, attention_mask=MASK)
    made = (it.generate(its, IDS, MASK, new=NEW, piece=piece) for its in (own, DynamicCache()))
    for mine, theirs in zip(*made, strict=True):
        assert torch.equal(mine, theirs)
    assert cache.lengths == tuple(len(prompt) + NEW - 1 for prompt in PROMPTS)


@each_cache
def test_a_first_piece_that_is_padding_in_every_sequence_changes_nothing(where: str) -> None:
    it = bench("llama", dtype=torch.float64)
    ids, mask = (torch.nn.functional.pad(columns, (5, 0)) for columns in (IDS, MASK))
    own = GenerateCache(empty(it, where), num_layers=2, attention_mask=mask)
    mine, theirs = (it.generate(its, ids, mask, new=NEW, piece=4) for its in (own, DynamicCache()))
    assert torch.equal(mine[0], theirs[0])
    torch.testing.assert_close(mine[1], theirs[1], rtol=0, atol=FP64_CONTRACT)


def feed(it: Bench, cache: GenerateCache, ids: Tensor, end: int) -> Tensor:
    """The logits of the last of the columns before `end`, whose newest are `ids`."""
    mask = torch.nn.functional.pad(MASK, (0, max(0, end - WIDTH)), value=1)[:, :end]
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        logits: Tensor = it.model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits
    return logits[:, -1]


@each_cache
def test_a_piece_that_failed_can_be_fed_again_or_in_smaller_ones(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = bench("llama", dtype=torch.float64)
    whole, broken = (
        GenerateCache(empty(it, where), num_layers=2, attention_mask=MASK) for _ in range(2)
    )

    def fail(ids: Tensor, end: int) -> None:
        """Feed, and fail between the layers."""
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
            patched.setattr(it.model.model.layers[0].mlp, "forward", raise_)
            feed(it, broken, ids, end)

    text = torch.cat([IDS, torch.arange(1, 1 + 3 * BATCH).view(BATCH, 3)], 1)
    fail(text[:, :9], 9)
    feed(it, broken, text[:, :2], 2)
    feed(it, broken, text[:, 2:9], 9)
    feed(it, whole, text[:, :9], 9)
    for start, end in ((9, WIDTH), (WIDTH, WIDTH + 1), (WIDTH + 1, WIDTH + 3)):
        fail(text[:, start:], WIDTH + 3)
        piece = text[:, start:end]
        pair = (feed(it, cache, piece, end) for cache in (broken, whole))
        torch.testing.assert_close(*pair, rtol=0, atol=FP64_CONTRACT)
    assert whole.num_columns == broken.num_columns == WIDTH + 3
    assert whole.cache.lengths == broken.cache.lengths == tuple(len(p) + 3 for p in PROMPTS)


def raise_(*args: object) -> None:
    raise RuntimeError("out of memory")
