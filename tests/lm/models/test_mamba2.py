"""A state cache makes a recurrent layer's steps equal its scan, at bytes that no length changes."""

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import CacheError
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.state import StateCache
from scope_rt.lm.models.mamba2 import Mamba2, Mamba2Config
from tests.rounding import FP64_CONTRACT, in_float64

pytestmark = pytest.mark.numeric

CONFIG = Mamba2Config(
    hidden_size=24, num_heads=6, head_dim=8, state_size=10, n_groups=2, conv_kernel=4
)
BATCH, TOKENS = 2, 11


def layer() -> Mamba2:
    torch.manual_seed(0)
    mixer = Mamba2(CONFIG).double().requires_grad_(False)
    for name in ("dt_bias", "A_log", "D"):
        parameter = mixer.get_parameter(name)
        parameter.copy_(torch.randn(parameter.shape))
    return mixer


def state_cache() -> StateCache:
    return StateCache(
        CONFIG.state_format(DType.FLOAT64), layers=(5,), batch=BATCH, device=torch.device("cpu")
    )


def hidden() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, TOKENS, 24, generator=generator, dtype=torch.float64)


def run(mixer: Mamba2, x: Tensor, spans: list[int]) -> tuple[Tensor, StateCache]:
    cache, outputs = state_cache(), []
    for part in x.split(spans, dim=1):
        cache.extend([part.shape[1]] * BATCH)
        outputs.append(mixer(part, cache=cache, layer=5))
        cache.advance()
    return torch.cat(outputs, 1), cache


def test_steps_equal_the_scan() -> None:
    mixer, x = layer(), hidden()
    scanned, after_scan = run(mixer, x, [TOKENS])
    for spans in ([1] * TOKENS, [4, 1, 1, 5], [2, 9]):
        stepped, after_steps = run(mixer, x, spans)
        assert (stepped - scanned).abs().max() <= FP64_CONTRACT
        for mine, want in zip(after_steps.state(5), after_scan.state(5), strict=True):
            assert (mine - want).abs().max() <= FP64_CONTRACT
    assert (stepped - scanned).abs().max() > 0, "two forms, not one"


def test_a_span_computed_again_moves_the_state_once() -> None:
    mixer, x = layer(), hidden()
    want, _ = run(mixer, x, [TOKENS])
    cache = state_cache()
    for part in x.split([6, 5], dim=1):
        cache.extend([part.shape[1]] * BATCH)
        mixer(-part, cache=cache, layer=5)
        got = mixer(part, cache=cache, layer=5)
        cache.advance()
    assert (got - want[:, 6:]).abs().max() <= FP64_CONTRACT


@pytest.mark.parametrize("counts", [(6, 2), (5, 5), (6, 7)])
def test_padding_never_goes_into_a_state(counts: tuple[int, int]) -> None:
    cache = state_cache()
    cache.extend(counts)
    with pytest.raises(CacheError, match=r"want 6 tokens, or 0, of each sequence"):
        layer()(hidden()[:, :6], cache=cache, layer=5)


def test_a_sequence_may_sit_out_a_span() -> None:
    mixer, x = layer(), hidden()
    want, _ = run(mixer, x, [6, 5])
    cache = state_cache()
    cache.extend([6, 0])
    mixer(x[:, :6], cache=cache, layer=5)
    cache.advance()
    cache.extend([5, 0])
    got = mixer(x[:, 6:], cache=cache, layer=5)
    cache.advance()
    assert (got[0] - want[0, 6:]).abs().max() <= FP64_CONTRACT
    assert cache.lengths == (TOKENS, 0)
    assert not cache.state(5)[1][1].any()


def test_the_state_takes_the_same_bytes_at_any_length() -> None:
    caches = [run(layer(), hidden()[:, :length], [length])[1] for length in (1, TOKENS)]
    channels = 6 * 8 + 2 * 2 * 10
    want = BATCH * (channels * 3 + 6 * 8 * 10) * 8
    assert {cache.num_bytes for cache in caches} == {want}
    assert CONFIG.state_format(DType.FLOAT64).bytes_per_layer * BATCH == want


def mamba2_sizes() -> dict[str, object]:
    """`CONFIG` as transformers' configuration takes it."""
    sizes = {name: getattr(CONFIG, name) for name in CONFIG.__slots__}
    return {**sizes, "expand": 2, "use_bias": False, "chunk_size": 4}


class OnStates(torch.nn.Module):
    """A `Mamba2` that a transformers block can call: the cache is ours."""

    def __init__(self, mixer: Mamba2, cache: StateCache, layer: int) -> None:
        super().__init__()
        self.mixer, self.cache, self.layer = mixer, cache, layer

    def forward(self, hidden_states: Tensor, **_: object) -> Tensor:
        out: Tensor = self.mixer(hidden_states, cache=self.cache, layer=self.layer)
        return out


def test_a_whole_mamba2_model_decodes_on_its_states() -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = modeling.Mamba2Config(**mamba2_sizes(), num_hidden_layers=2, vocab_size=40)
    torch.manual_seed(3)
    with in_float64():
        model = modeling.Mamba2ForCausalLM(config).double().requires_grad_(False).eval()
        tokens = torch.randint(40, (BATCH, TOKENS))
        want = model(tokens, use_cache=False).logits
    cache = StateCache(
        CONFIG.state_format(DType.FLOAT64),
        layers=(0, 1),
        batch=BATCH,
        device=torch.device("cpu"),
    )
    for index, block in enumerate(model.backbone.layers):
        mixer = layer()
        mixer.load_state_dict(block.mixer.state_dict())
        block.mixer = OnStates(mixer, cache, index)
    logits = []
    for part in tokens.split([5, 1, 1, 4], dim=1):
        cache.extend([part.shape[1]] * BATCH)
        with in_float64():
            logits.append(model(part, use_cache=False).logits)
        cache.advance()
    assert (torch.cat(logits, 1) - want).abs().max() <= FP64_CONTRACT
    assert cache.lengths == (TOKENS,) * BATCH


def test_the_layer_equals_transformers_mamba2() -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = modeling.Mamba2Config(**mamba2_sizes(), num_hidden_layers=1)
    theirs = modeling.Mamba2Mixer(config, layer_idx=0).double()
    mine = layer()
    mine.load_state_dict(theirs.state_dict())
    with torch.no_grad(), in_float64():
        want = theirs(hidden())
    got, _ = run(mine, hidden(), [4, 1, 6])
    assert (got - want).abs().max() <= FP64_CONTRACT
