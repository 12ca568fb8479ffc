"""Absorbed decode is expand-then-attend, on transformers' own DeepSeek attention too."""

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import CacheError, UserInputError
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.indexer import mask_of
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.models.lightning_indexer import IndexerConfig, LightningIndexer
from scope_rt.lm.models.mla import MLA, MLAConfig, MLAForm
from tests.rounding import FP64_CONTRACT, in_float64

pytestmark = pytest.mark.numeric

SIZES = MLAConfig(
    hidden_size=48,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
)
CPU = torch.device("cpu")
BATCH, TOKENS = 2, 9


class Rank:
    """One of several ranks, whose partial sums the test adds up itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor


def layer(group: Rank | None = None) -> MLA:
    torch.manual_seed(0)
    return MLA(SIZES, group).double().requires_grad_(False)


def deepseek_sizes() -> dict[str, object]:
    """`SIZES` as transformers' configuration takes them."""
    return {
        **{name: getattr(SIZES, name) for name in SIZES.__slots__ if name != "rope_theta"},
        "num_key_value_heads": SIZES.num_attention_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": SIZES.rope_theta},
        "attn_implementation": "eager",
    }


def latent_cache(*, num_layers: int = 1, max_tokens: int = TOKENS) -> ContiguousCache:
    return ContiguousCache(
        SIZES.row_format(DType.FLOAT64),
        layers=AttnLayerMap.all_of(num_layers),
        batch=BATCH,
        max_tokens=max_tokens,
        device=CPU,
    )


def hidden() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, TOKENS, 48, generator=generator, dtype=torch.float64)


def run(mla: MLA, x: Tensor, spans: list[int], form: MLAForm) -> tuple[Tensor, ContiguousCache]:
    cache, start, outputs = latent_cache(), 0, []
    for span in spans:
        positions = torch.arange(start, start + span).expand(BATCH, -1)
        cache.extend([span] * BATCH)
        part = x[:, start : start + span]
        outputs.append(mla(part, positions_BT=positions, cache=cache, layer=0, form=form))
        cache.advance()
        start += span
    return torch.cat(outputs, 1), cache


def test_absorbed_decode_equals_expand_then_attend() -> None:
    mla, x = layer(), hidden()
    whole, _ = run(mla, x, [TOKENS], MLAForm.EXPANDED)
    for spans in ([TOKENS], [4, 1, 3, 1], [1] * TOKENS):
        decoded, _ = run(mla, x, spans, MLAForm.ABSORBED)
        assert (decoded - whole).abs().max() <= FP64_CONTRACT
    assert (decoded - whole).abs().max() > 0, "two forms, not one"


def test_absorbed_decode_equals_transformers_deepseek_attention() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(**deepseek_sizes())
    theirs = modeling.DeepseekV3Attention(config, layer_idx=0).double()
    mine, x = layer(), hidden()
    mine.load_state_dict(theirs.state_dict())
    positions = torch.arange(TOKENS)[None]
    causal = torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad(), in_float64():
        angles = modeling.DeepseekV3RotaryEmbedding(config)
        want, _ = theirs(x, angles(x, positions), causal)
    got, _ = run(mine, x, [4, 1, 1, 3], MLAForm.ABSORBED)
    assert (got - want).abs().max() <= FP64_CONTRACT


class OnLatents(torch.nn.Module):
    """An `MLA` that a transformers decoder layer can call: the cache is ours."""

    def __init__(self, mla: MLA, cache: ContiguousCache, layer: int) -> None:
        super().__init__()
        self.mla, self.cache, self.layer = mla, cache, layer

    def forward(
        self, hidden_states: Tensor, *, position_ids: Tensor, **_: object
    ) -> tuple[Tensor, None]:
        where = position_ids.expand(len(hidden_states), -1)
        out = self.mla(hidden_states, positions_BT=where, cache=self.cache, layer=self.layer)
        return out, None


def test_a_whole_deepseek_model_decodes_on_its_latents() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        **deepseek_sizes(),
        vocab_size=40,
        num_hidden_layers=3,
        intermediate_size=32,
        first_k_dense_replace=3,
    )
    torch.manual_seed(3)
    with in_float64():
        model = modeling.DeepseekV3ForCausalLM(config).double().requires_grad_(False).eval()
        tokens = torch.randint(40, (BATCH, TOKENS))
        want = model(tokens, use_cache=False).logits
    cache = latent_cache(num_layers=3)
    for index, decoder in enumerate(model.model.layers):
        mla = layer()
        mla.load_state_dict(decoder.self_attn.state_dict())
        decoder.self_attn = OnLatents(mla, cache, index)
    logits = []
    for part in tokens.split([4, 1, 1, 3], dim=1):
        where = torch.arange(cache.lengths[0], cache.lengths[0] + part.shape[1])[None]
        cache.extend([part.shape[1]] * BATCH)
        with in_float64():
            logits.append(model(part, position_ids=where, use_cache=False).logits)
        cache.advance()
    assert (torch.cat(logits, 1) - want).abs().max() <= FP64_CONTRACT
    assert cache.counters.rows_written == BATCH * TOKENS * 3


def test_every_rank_holds_the_whole_latent_and_a_share_of_the_heads() -> None:
    whole, x = layer(), hidden()
    want, cache = run(whole, x, [5, 4], MLAForm.ABSORBED)
    total = torch.zeros_like(want)
    for rank in (0, 1):
        part = layer(Rank(rank, 2))
        for name, weight in whole.state_dict().items():
            axis = {"q_b_proj.weight": 0, "kv_b_proj.weight": 0, "o_proj.weight": 1}.get(name)
            mine = weight if axis is None else weight.chunk(2, axis)[rank]
            part.state_dict()[name].copy_(mine)
        out, own = run(part, x, [5, 4], MLAForm.ABSORBED)
        total += out
        assert own.digest() == cache.digest()
        assert own.num_bytes == cache.num_bytes
    assert (total - want).abs().max() <= FP64_CONTRACT
    assert SIZES.row_format(DType.FLOAT64).shard(2) == SIZES.row_format(DType.FLOAT64)


def test_ragged_sequences_decode_as_each_alone() -> None:
    mla, x = layer(), hidden()
    whole, _ = run(mla, x, [TOKENS], MLAForm.EXPANDED)
    cache = latent_cache()
    for counts in ([3, 1], [1, 5], [2, 0]):
        starts = torch.tensor(cache.lengths)[:, None]
        positions = starts + torch.arange(max(counts))
        rows = positions.clamp(max=TOKENS - 1)[..., None].expand(-1, -1, 48)
        cache.extend(counts)
        out = mla(x.gather(1, rows), positions_BT=positions, cache=cache, layer=0)
        for sequence, count in enumerate(counts):
            start = cache.lengths[sequence]
            want = whole[sequence, start : start + count]
            assert torch.allclose(out[sequence, :count], want, rtol=0, atol=FP64_CONTRACT)
        cache.advance()


def test_a_latent_costs_1152_bytes_and_full_keys_and_values_12288() -> None:
    """DeepSeek's sizes in bfloat16, counted from the tensors of real caches."""
    latent = RowFormat.latent(rank=512, rope_dim=64, dtype=DType.BFLOAT16)
    full = RowFormat.full(heads=24, head_dim=128, dtype=DType.BFLOAT16)
    per_token = []
    for row_format in (latent, full):
        cache = ContiguousCache(
            row_format, layers=AttnLayerMap.all_of(2), batch=3, max_tokens=5, device=CPU
        )
        cache.extend([5, 5, 5])
        for index in range(2):
            cache.append(
                index,
                *(torch.zeros(3, 5, p.heads, p.dim).bfloat16() for p in row_format.planes),
            )
        cache.advance()
        counted = sum(plane.nbytes for index in range(2) for plane in cache.view(index))
        assert counted == cache.num_bytes
        per_token.append(counted // (2 * 3 * 5))
    assert per_token == [1152, 12_288]
    assert per_token[1] / per_token[0] == pytest.approx(10.67, abs=0.005)


@pytest.mark.parametrize("codec", [kind for kind in CodecKind if kind is not CodecKind.IDENTITY])
def test_a_latent_is_not_quantized(codec: CodecKind) -> None:
    latent = RowFormat.latent(rank=512, rope_dim=64, dtype=DType.BFLOAT16)
    with pytest.raises(UserInputError, match="keep latent caches at codec identity"):
        RowFormat(planes=latent.planes, dtype=DType.BFLOAT16, codec=codec)


def test_scores_beyond_the_dense_bound_are_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(MLA, "absorbed")  # that would take gigabytes
    many = 9000
    cache = latent_cache(max_tokens=many)
    cache.extend([many] * BATCH)
    x = torch.zeros(1, 1, 48, dtype=torch.float64).expand(BATCH, many, -1)
    positions = torch.arange(many).expand(BATCH, -1)
    with pytest.raises(CacheError, match=rf"dense attention of {many} queries.*queries at once"):
        layer()(x, positions_BT=positions, cache=cache, layer=0)
    assert cache.counters.rows_written == 0


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserInputError, match="divisor of the model's 4 heads"):
        MLA(SIZES, Rank(0, 3))


def indexer(top_k: int) -> LightningIndexer:
    torch.manual_seed(2)
    config = IndexerConfig(
        hidden_size=48,
        q_lora_rank=24,
        index_n_heads=3,
        index_head_dim=12,
        index_topk=top_k,
        qk_rope_head_dim=8,
    )
    return LightningIndexer(config).double().requires_grad_(False)


def sparse(top_k: int, spans: list[int]) -> tuple[Tensor, ContiguousCache]:
    mla, choose, x = layer(), indexer(top_k), hidden()
    latents, start, outputs = latent_cache(), 0, []
    keys = ContiguousCache(
        choose.config.row_format(DType.FLOAT64),
        layers=AttnLayerMap.all_of(1),
        batch=BATCH,
        max_tokens=TOKENS,
        device=CPU,
    )
    for span in spans:
        part, positions = x[:, start : start + span], torch.arange(start, start + span)
        where = positions.expand(BATCH, -1)
        for cache in (latents, keys):
            cache.extend([span] * BATCH)
        q_latent = mla.q_a_layernorm(mla.q_a_proj(part))
        rows = choose(part, q_latent, positions_BT=where, cache=keys, layer=0)
        outputs.append(mla(part, positions_BT=where, cache=latents, layer=0, selected_BTS=rows))
        for cache in (latents, keys):
            cache.advance()
        start += span
    return torch.cat(outputs, 1), keys


@pytest.mark.parametrize("top_k", [TOKENS, TOKENS + 5])
def test_an_index_of_all_rows_is_dense_attention(top_k: int) -> None:
    dense, _ = run(layer(), hidden(), [TOKENS], MLAForm.ABSORBED)
    got, keys = sparse(top_k, [4, 1, 4])
    assert (got - dense).abs().max() <= FP64_CONTRACT
    assert keys.num_bytes == BATCH * TOKENS * 12 * 8, "a small cache of its own"


def test_an_index_of_few_rows_decodes_as_it_prefills_and_differs_from_dense() -> None:
    dense, _ = run(layer(), hidden(), [TOKENS], MLAForm.ABSORBED)
    whole, _ = sparse(3, [TOKENS])
    stepped, _ = sparse(3, [4, 1, 1, 3])
    assert (stepped - whole).abs().max() <= FP64_CONTRACT
    assert (whole - dense).abs().max() > 1e-3


def test_the_indexer_chooses_what_transformers_indexer_chooses() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    mine, top_k = indexer(3), 3
    c = mine.config
    config = modeling.DeepseekV32Config(
        hidden_size=48,
        q_lora_rank=24,
        index_n_heads=c.index_n_heads,
        index_head_dim=c.index_head_dim,
        index_topk=top_k,
        qk_rope_head_dim=c.qk_rope_head_dim,
        num_attention_heads=4,
        num_hidden_layers=1,
    )
    theirs = modeling.DeepseekV32Indexer(config, layer_idx=0).double()
    mine.load_state_dict(theirs.state_dict())
    x, q_latent = hidden(), torch.randn(BATCH, TOKENS, 24, dtype=torch.float64)
    positions = torch.arange(TOKENS).expand(BATCH, -1)
    exponents = torch.arange(0, 8, 2, dtype=torch.float64) / 8
    angles = positions[..., None].double() * c.rope_theta**-exponents
    cos_sin = tuple(f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    causal = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None].expand(BATCH, -1, -1)
    theirs_rows = theirs(x, q_latent, cos_sin, causal, positions)
    cache = ContiguousCache(
        c.row_format(DType.FLOAT64),
        layers=AttnLayerMap.all_of(1),
        batch=BATCH,
        max_tokens=TOKENS,
        device=CPU,
    )
    cache.extend([TOKENS] * BATCH)
    rows = mine(x, q_latent, positions_BT=positions, cache=cache, layer=0)
    causal_mask = causal == 0
    assert torch.equal(mask_of(rows, TOKENS), mask_of(theirs_rows.long(), TOKENS) & causal_mask)
