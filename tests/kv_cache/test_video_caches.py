"""Whatever keeps a stream's past, the present is exact, and the window is full."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheChoice
from scope_contracts.call_budget import CallBudget
from scope_contracts.envelope import CONDITIONING_EMBEDS, CONTEXT_FRAMES_OVERRIDE, LATENTS_IN
from scope_rt.collectives import SoloCollectives
from tests.lm.cache.stream_caches import KINDS, LOSSY, opened, rows, run_chunk, spec_of
from tests.tiny_models import BLOCK, STEPS, Rollout, envelope


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_what_the_spec_counts_on_any_number_of_ranks(kind: str) -> None:
    class OfTwo(SoloCollectives):
        size = 2

    spec = spec_of(kind)
    assert opened(spec).num_bytes == spec.num_bytes(1)
    assert opened(spec, OfTwo()).num_bytes == spec.num_bytes(2)
    assert spec.num_bytes(2) * 2 == spec.num_bytes(1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_stands_where_the_spec_says_and_shows_as_many_frames(kind: str) -> None:
    cache = opened(spec_of(kind, sink=1, window=9))
    for chunk in range(7):
        window = cache.window(start_frame=BLOCK * chunk, num_frames=BLOCK)
        run_chunk(cache, chunk)
        assert cache.indices == cache.spec.indices_at(BLOCK * (chunk + 1))
        tokens = len(window.frames_in_view) * cache.spec.frame_tokens
        assert tokens == cache.indices.local_end_index
        assert set(range(BLOCK * chunk, BLOCK * (chunk + 1))) <= set(window.frames_in_view)
        assert 0 in window.frames_in_view, "the sink was evicted"
    layers, tokens = cache.spec.num_layers, cache.spec.frame_tokens
    gone = 7 * BLOCK - len(cache.frames_kept)
    assert cache.counters.rows_evicted == gone * tokens * layers
    assert cache.counters.rows_written == 7 * BLOCK * tokens * layers
    assert cache.counters.advances == 7


@pytest.mark.parametrize("kind", LOSSY)
def test_the_chunk_in_flight_sees_itself_exact_and_only_its_last_call_is_encoded(kind: str) -> None:
    cache = opened(spec_of(kind))
    run_chunk(cache, 0)
    before = [part.clone() for plane in cache.storage.rows.parts for part in plane]
    window = cache.window(start_frame=BLOCK, num_frames=BLOCK)
    k = rows(cache.spec, 1)
    shown_k, shown_v = cache.update(0, window, k, -k, is_last=False)
    own = slice(BLOCK * cache.spec.frame_tokens, None)
    assert torch.equal(shown_k[:, own], k)
    assert torch.equal(shown_v[:, own], -k)
    after = [part for plane in cache.storage.rows.parts for part in plane]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    again, _ = cache.update(0, window, k, -k)
    assert torch.equal(again, shown_k)
    for layer in range(1, cache.spec.num_layers):
        cache.update(layer, window, k, -k)
    cache.advance(window)
    kept, _ = cache.cached(0)
    assert not torch.equal(kept[:, own], k)
    assert (kept[:, own] - k).abs().max() <= (1 + 2**-9) / 15 * k.abs().max()  # int4: half a
    # step of a range of twice the largest over 15; range and minimum are stored in float16


def test_counters_count_every_row_of_the_batch() -> None:
    spec = replace(spec_of("ring", sink=1, window=6), batch=2)
    cache = opened(spec)
    for chunk in range(3):
        run_chunk(cache, chunk, lambda n: rows(spec, n).expand(2, -1, -1, -1))
    per_frame = 2 * spec.frame_tokens * spec.num_layers
    assert cache.counters.rows_written == 9 * per_frame
    assert cache.counters.rows_read == (3 + 6 + 7) * per_frame
    assert cache.counters.rows_evicted == 2 * per_frame


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_streams_on_every_kind_and_stays_close_to_the_ring(kind: str) -> None:
    ring, other = (Rollout(sink=1, window=9, cache=CacheChoice.named(k)) for k in ("ring", kind))
    for want, got in zip(ring.run(range(3)), other.run(range(3)), strict=True):
        assert torch.equal(got, want) or ":" in kind
        assert (got - want).abs().max() < 0.2


def test_only_the_last_call_of_a_chunk_is_encoded() -> None:
    rollout = Rollout(sink=1, window=9, cache=CacheChoice.named("quantized:int8"))
    rollout.run(range(3))
    spec, counters = rollout.generator.cache.spec, rollout.generator.cache.counters
    assert counters.rows_written == 3 * BLOCK * spec.frame_tokens * spec.num_layers


def test_without_a_clean_pass_the_last_denoising_step_is_encoded() -> None:
    """As a model streams that rebuilds its cache: here every other chunk."""
    made: dict[str, list[Tensor]] = {}
    for kind in ("ring", "quantized:int8"):
        rollout = Rollout(sink=0, window=9, cache=CacheChoice.named(kind))
        made[kind] = []
        for chunk in range(4):
            plan = replace(
                envelope(chunk, calls=len(STEPS) + chunk % 2),
                clean_pass=False,
                do_kv_recompute=chunk % 2 == 1,
            )
            tensors = {LATENTS_IN: rollout.noise(chunk), CONDITIONING_EMBEDS: rollout.text}
            if plan.do_kv_recompute:
                tensors[CONTEXT_FRAMES_OVERRIDE] = made[kind][-1]
            budget = CallBudget(chunk, plan.expected_generator_calls)
            made[kind].append(rollout.generator.generate(plan, tensors, budget.enter))
    spec, counters = rollout.generator.cache.spec, rollout.generator.cache.counters
    num_frames = 4 * BLOCK + 2 * BLOCK
    assert counters.rows_written == num_frames * spec.frame_tokens * spec.num_layers
    for want, got in zip(made["ring"], made["quantized:int8"], strict=True):
        assert (got - want).abs().max() < 0.2
