"""On a GPU, codecs, pages and heavy hitters do what they do on the CPU, and fp8 is fp8."""

from dataclasses import replace

import pytest
import torch

from scope_contracts.cache_spec import CacheChoice
from scope_contracts.row_format import CodecKind
from scope_contracts.tensor_spec import DType
from scope_rt.kv_cache.codec import codec_for
from scope_rt.kv_cache.factory import open_frame_cache
from tests.kv_cache.test_codec import largest_loss, rounding
from tests.rounding import unit_roundoff
from tests.tiny_models import BLOCK, CONFIG, cache_spec

KINDS = ["ring", "paged", "quantized:int8", "quantized:int4", "quantized:fp8", "h2o"]


@pytest.mark.parametrize("kind", list(CodecKind))
def test_a_codec_stores_on_the_gpu_what_it_stores_on_the_cpu(
    kind: CodecKind, device: torch.device
) -> None:
    x = torch.randn(4, 64, 8, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    here = codec_for(kind, torch.device("cpu"))
    there = codec_for(kind, device)
    stored = there.encode(x.to(device))
    back, parts = there.decode(stored, x.dtype).cpu(), tuple(part.cpu() for part in stored)
    if kind is CodecKind.IDENTITY:
        assert torch.equal(back, x)
        return
    loss = (back.double() - x.double()).abs()
    assert (loss <= largest_loss(kind, x.double(), parts) + rounding(x)).all()
    for mine, want in zip(parts[1:], here.encode(x)[1:], strict=True):
        assert ((mine - want).abs() <= 2 * unit_roundoff(torch.float16) * want.abs()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_keeps_on_the_gpu_the_frames_it_keeps_on_the_cpu(
    kind: str, device: torch.device
) -> None:
    choice = CacheChoice.named(kind)
    spec = replace(
        cache_spec(sink=1, window=9, dtype=DType.FLOAT32), kind=choice.kind, codec=choice.codec
    )
    caches = [open_frame_cache(spec, device=place) for place in (torch.device("cpu"), device)]
    heads, dim = CONFIG.num_attention_heads, CONFIG.attention_head_dim
    for chunk in range(6):
        generator = torch.Generator().manual_seed(chunk)
        k = 3 * torch.randn(1, BLOCK * spec.frame_tokens, heads, dim, generator=generator)
        for cache in caches:
            window = cache.window(start_frame=BLOCK * chunk, num_frames=BLOCK)
            for layer in range(spec.num_layers):
                mine = k.to(cache.device)
                shown, _ = cache.update(layer, window, mine, -mine)
                if spec.needs_attention_scores:
                    cache.observe(layer, window, mine, shown)
            cache.advance(window)
    first, second = caches
    assert first.frames_kept == second.frames_kept
    for layer in range(spec.num_layers):
        for a, b in zip(first.cached(layer), second.cached(layer), strict=True):
            assert torch.allclose(
                a, b.cpu(), atol=1e-5 if kind in ("ring", "paged", "h2o") else 0.3
            )
