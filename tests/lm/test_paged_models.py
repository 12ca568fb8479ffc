"""Real transformers models decode on blocks what they decode in one piece, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from scope_contracts.errors import CacheError, UnsupportedError, UserInputError
from scope_contracts.row_format import CodecKind
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.model_cache import GenerateCache
from tests.lm.cache.waits import Waits
from tests.lm.paged_batch import (
    BATCH,
    PREFIXES,
    PROMPTS,
    REUSED,
    SCOPE,
    Bench,
    bench,
    copied_batch,
    padded,
    shared_batch,
)
from tests.rounding import FP64_CONTRACT

pytestmark = pytest.mark.numeric

each_model = pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek_v3"])
STEPS = 7
SUFFIXES = [prompt[reused:] for prompt, reused in zip(PROMPTS, REUSED, strict=True)]


def decode(it: Bench, cache: Any, tokens: list[list[int]]) -> list[Tensor]:
    """Logits of every step of greedy decoding."""
    steps = []
    for _ in range(STEPS):
        logits = it.feed(cache, tokens)
        steps.append(logits)
        tokens = logits.argmax(-1)[:, None].tolist()
    return steps


@each_model
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_paged_decode_equals_contiguous_decode_bit_for_bit(kind: str, attention: str) -> None:
    it = bench(kind, attention=attention)
    store = it.store()
    paged, contiguous = shared_batch(it, store), copied_batch(it)
    assert paged.lengths == contiguous.lengths == tuple(REUSED)
    pairs = zip(decode(it, paged, SUFFIXES), decode(it, contiguous, SUFFIXES), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert paged.digest() == contiguous.digest()
    assert store.counters.prefix_hits == sum(REUSED)
    assert store.counters.gathers > 0


@each_model
def test_decoding_from_a_shared_prefix_equals_one_pass_over_the_whole_text(kind: str) -> None:
    it = bench(kind, dtype=torch.float64)
    logits = it.feed(shared_batch(it, it.store()), SUFFIXES)
    for prompt, row in zip(PROMPTS, logits, strict=True):
        with torch.no_grad():
            whole = it.model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(row, whole, rtol=0, atol=FP64_CONTRACT)


@each_model
def test_generate_on_blocks_equals_generate_on_a_dynamic_cache_bit_for_bit(kind: str) -> None:
    it = bench(kind)
    ids, mask = padded(PROMPTS)
    store = it.store()
    paged = PagedCache(store, [store.start() for _ in range(BATCH)])
    layers = it.rows.layers.num_layers
    own = GenerateCache(paged, num_layers=layers, attention_mask=mask)
    made = (it.generate(its, ids, mask, new=STEPS) for its in (own, DynamicCache()))
    for mine, theirs in zip(*made, strict=True):
        assert torch.equal(mine, theirs)
    assert paged.lengths == tuple(len(prompt) + STEPS - 1 for prompt in PROMPTS), "no padding"


@each_model
def test_generate_from_a_shared_prefix_equals_generate_from_copies_of_it(kind: str) -> None:
    it = bench(kind)
    prompts = [[*PREFIXES[0][:12], *suffix] for suffix in SUFFIXES]
    ids, mask = padded(prompts, prefix=12)
    store, copies = it.store(), DynamicCache()
    shared_batch(it, store).reset()
    with torch.no_grad():
        it.model(torch.tensor([PREFIXES[0]]), past_key_values=copies)
    copies.crop(-1)
    copies.batch_repeat_interleave(BATCH)
    keys = [store.keys(prompt, SCOPE) for prompt in prompts]
    matches = [store.prefixes.match(own, len(p)) for own, p in zip(keys, prompts, strict=True)]
    paged = PagedCache(store, [store.start(match) for match in matches])
    held = store.pool.num_blocks - store.pool.num_free
    own = GenerateCache(
        paged,
        num_layers=it.rows.layers.num_layers,
        attention_mask=mask,
        num_cached_columns=12,
    )
    made = (it.generate(its, ids, mask, new=STEPS) for its in (own, copies))
    pairs = zip(*made, strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert held == 3, "eight sequences hold one copy of the prefix"


def test_deepseeks_cache_holds_the_latent_and_the_rope_key_of_all_heads() -> None:
    it = bench("deepseek_v3", dtype=torch.float64)
    config = it.model.config
    names = [(plane.name, plane.heads, plane.dim) for plane in it.rows.row_format.planes]
    assert names == [("latent", 1, config.kv_lora_rank), ("rope_key", 1, config.qk_rope_head_dim)]
    cache = PagedCache(it.store(), [it.store().start()])
    it.feed(cache, [PROMPTS[0]])
    theirs = DynamicCache()
    with torch.no_grad():
        it.model(torch.tensor([PROMPTS[0]]), past_key_values=theirs)
    latent, rope_key = cache.view(0)
    pairs = ((latent, theirs.layers[0].keys), (rope_key, theirs.layers[0].values))
    for mine, want in pairs:
        torch.testing.assert_close(mine.transpose(1, 2), want, rtol=0, atol=FP64_CONTRACT)


def windowed() -> Bench:
    """A Qwen3 in float64 whose first layer sees 6 tokens and whose second sees all."""
    return bench(
        "qwen3",
        dtype=torch.float64,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        use_sliding_window=True,
    )


def test_layers_with_a_window_decode_on_blocks_that_leave_it() -> None:
    it = windowed()
    assert it.rows.windows == (6, None)
    store = it.store()
    cache = PagedCache(store, [store.start() for _ in range(2)])
    texts = [list(PROMPTS[0]), list(PROMPTS[5])]
    feeds = [list(text) for text in texts]
    for _ in range(12):
        logits = it.feed(cache, feeds)
        with torch.no_grad():
            for text, row in zip(texts, logits, strict=True):
                whole = it.model(torch.tensor([text]), use_cache=False).logits[0, -1]
                torch.testing.assert_close(row, whole, rtol=0, atol=FP64_CONTRACT)
        feeds = logits.argmax(-1)[:, None].tolist()
        texts = [[*text, *new] for text, new in zip(texts, feeds, strict=True)]
    assert store.counters.rows_evicted > 0


def test_a_step_sees_the_rows_that_were_kept_where_they_were_and_no_evicted_one() -> None:
    it, text, kept = windowed(), list(range(1, 12)), [0, 3, 4, 9]
    cache = it.contiguous(1)
    it.feed(cache, [text[:10]])
    for layer in it.rows.layers.attention_layers:
        cache.keep(layer, torch.tensor([kept]))
    logits = it.feed(cache, [text[10:]])
    hidden = torch.ones(11, 11, dtype=torch.bool).triu(1)
    hidden[10, [position for position in range(10) if position not in kept]] = True
    far = torch.ones(11, 11, dtype=torch.bool).tril(-6)
    masks = {
        kind: torch.zeros(1, 1, 11, 11).double().masked_fill(which, torch.finfo(torch.float64).min)
        for kind, which in {"full_attention": hidden, "sliding_attention": hidden | far}.items()
    }
    with torch.no_grad():
        whole = it.model(torch.tensor([text]), attention_mask=masks, use_cache=False)
    torch.testing.assert_close(logits[0], whole.logits[0, -1], rtol=0, atol=FP64_CONTRACT)


def test_a_latent_model_is_refused_by_the_quantizer_before_anything_is_made() -> None:
    with pytest.raises(UserInputError, match="keep latent caches at codec identity"):
        bench("deepseek_v3", codec=CodecKind.INT8)


def test_int8_blocks_decode_what_contiguous_int8_rows_do_bit_for_bit() -> None:
    it = bench("llama", codec=CodecKind.INT8)
    store = it.store()
    paged = PagedCache(store, [store.start() for _ in range(BATCH)])
    pairs = zip(decode(it, paged, PROMPTS), decode(it, it.contiguous(BATCH), PROMPTS), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_layers_that_keep_no_rows_are_refused_by_name() -> None:
    with pytest.raises(UserInputError, match="chunked_attention"):
        bench("qwen3", layer_types=["chunked_attention", "full_attention"])


def test_a_cache_that_holds_other_tokens_is_refused_before_generate_runs() -> None:
    it = bench("llama")
    store = it.store()
    cache = PagedCache(store, [store.start()])
    it.feed(cache, [[1, 2, 3]])
    with pytest.raises(UserInputError, match="say how many columns it holds"):
        GenerateCache(cache, num_layers=2, attention_mask=torch.ones(1, 5))


def test_a_cache_that_loses_rows_is_refused_before_generate_runs() -> None:
    it = windowed()
    store = it.store()
    paged, evicted = PagedCache(store, [store.start()]), it.contiguous(1)
    it.feed(evicted, [[1, 2, 3]])
    evicted.keep(1, torch.tensor([[0, 2]]))
    for cache, columns, says in (
        (paged, 0, "rows that leave a window"),
        (evicted, 3, "rows were evicted"),
    ):
        with pytest.raises(UnsupportedError, match=f"{says}.*use next_logits"):
            GenerateCache(
                cache,
                num_layers=2,
                attention_mask=torch.ones(1, 5),
                num_cached_columns=columns,
            )


def test_a_step_does_not_wait_for_the_device_before_its_logits_are_there() -> None:
    it = bench("llama")
    store = it.store()
    for cache in (it.contiguous(2), PagedCache(store, [store.start(), store.start()])):
        it.feed(cache, [[1, 2, 3], [1]])
        with Waits() as waits:
            it.feed(cache, [[1], [2]])
        assert waits.names == []


def test_scores_that_would_not_fit_are_refused_before_anything_is_touched() -> None:
    it = bench("llama")  # 4 heads: 16 bytes a query and row
    cache = it.contiguous(1, max_tokens=8_200)
    with pytest.raises(CacheError, match="give at most 8184 queries at once"):
        it.feed(cache, [[1] * 8_200])
    assert cache.lengths == (0,)
    cache.truncate([0])  # no span was opened
    it.feed(cache, [[1, 2]])


def test_beam_search_is_refused_with_what_to_use_instead() -> None:
    it = bench("llama")
    store = it.store()
    cache = PagedCache(store, [store.start()])
    own = GenerateCache(cache, num_layers=2, attention_mask=torch.ones(1, 3))
    with pytest.raises(UnsupportedError, match="DynamicCache"):
        own.reorder_cache(torch.tensor([0]))


def test_a_full_pool_stops_a_batch_before_a_row_is_written() -> None:
    it = bench("llama")
    store = it.store(num_blocks=5)
    cache = PagedCache(store, [store.start() for _ in range(2)])
    it.feed(cache, [list(range(1, 9)), list(range(1, 9))])
    before = (cache.digest(), store.pool.num_free, store.counters.rows_written)
    with pytest.raises(CacheError, match="no room for 2 more blocks: 1 of 5"):
        it.feed(cache, [[1], [1]])
    assert (cache.digest(), store.pool.num_free, store.counters.rows_written) == before
