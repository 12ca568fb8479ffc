"""A codec stores what the policy keeps: codes, scales and scores of a row move together."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from scope_contracts.row_format import CodecKind
from scope_rt.kv_cache.codec import CODECS, Identity
from scope_rt.lm import eviction
from scope_rt.lm.eviction import install_kv_eviction
from tests.lm.eviction_models import GROUPED, prompt, tiny_lm
from tests.rounding import FP64_CONTRACT

pytestmark = pytest.mark.numeric

SIZES: dict[str, Any] = {"budget": 3, "n_sink": 2, "n_recent": 3}
CAPACITY = 8
LOSSY = [kind for kind in CodecKind if kind is not CodecKind.IDENTITY]
HEAD_DIM = 16


class Lossy(Identity):
    """Rows lose what `codec` loses, and are then kept as they are."""

    def __init__(self, codec: CodecKind) -> None:
        self._codec = CODECS[codec]()

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self._codec.decode(self._codec.encode(x), x.dtype),)


def model_with(
    codec: CodecKind, *, per_head: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    model = tiny_lm("llama", dtype=dtype, head_dim=HEAD_DIM)
    install_kv_eviction(model, **SIZES, codec=codec, per_head=per_head)
    return model


def generated(model: Any, **options: Any) -> tuple[Tensor, Any]:
    out = model.generate(
        prompt(14, batch=2),
        max_new_tokens=10,
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )
    return out.sequences, out.past_key_values


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(("per_head", "num_beams"), [(False, 1), (True, 1), (False, 3)])
def test_an_encoded_row_leaves_and_moves_whole(
    monkeypatch: pytest.MonkeyPatch, codec: CodecKind, per_head: bool, num_beams: int
) -> None:
    tokens, cache = generated(model_with(codec, per_head=per_head), num_beams=num_beams)
    monkeypatch.setattr(eviction, "codec_for", lambda kind, device: Lossy(codec))
    want_tokens, want = generated(model_with(codec, per_head=per_head), num_beams=num_beams)
    assert torch.equal(tokens, want_tokens)
    for layer, expected in zip(cache.layers, want.layers, strict=True):
        assert layer.num_rows == CAPACITY
        assert torch.equal(layer.positions, expected.positions)
        assert torch.equal(layer.rows.mass, expected.rows.mass)
        assert torch.equal(layer.keys, expected.keys)
        assert torch.equal(layer.values, expected.values)


def test_what_is_stored_is_as_small_as_the_codec_says() -> None:
    heads, layers = GROUPED["num_key_value_heads"], GROUPED["num_hidden_layers"]
    known = 8 + 4 + 1  # column, score, whether it is real
    for codec, num_bytes in (("identity", 4 * HEAD_DIM), ("int8", HEAD_DIM + 2), ("int4", 12)):
        model, cache = model_with(CodecKind(codec)), DynamicCache()
        model(prompt(20), past_key_values=cache)
        held = sum(layer.num_bytes for layer in cache.layers)
        assert held == layers * CAPACITY * (2 * heads * num_bytes + known)


def test_a_prefill_sees_its_rows_as_every_later_step_will() -> None:
    """So feeding tokens at once or one by one is the same computation, whatever the codec loses."""
    ids = prompt(7)  # nothing is evicted yet
    model = model_with(CodecKind.INT4, dtype=torch.float64)
    at_once = model(ids, past_key_values=DynamicCache()).logits[:, -1]
    exact = tiny_lm("llama", dtype=torch.float64, head_dim=HEAD_DIM)(ids).logits[:, -1]
    cache = DynamicCache()
    for token in ids.split(1, dim=-1):
        one_by_one = model(token, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(one_by_one, at_once, rtol=0, atol=FP64_CONTRACT)
    assert (at_once - exact).abs().max() > 1e-2
