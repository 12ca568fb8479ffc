import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from scope_rt.lm.eviction import install_kv_eviction, remove_kv_eviction
from scope_rt.lm.eviction_layer import EvictingLayer
from tests.lm.eviction_models import KINDS, prompt, tiny_lm
from tests.lm.reference_h2o import ReferenceH2O
from tests.rounding import FP64_CONTRACT

pytestmark = pytest.mark.numeric

SIZES: dict[str, Any] = {"budget": 3, "n_sink": 2, "n_recent": 3}
CAPACITY = 8


@torch.no_grad()
def decode(
    model: Any, ids: Tensor, num_tokens: int, *, cache: Any = None, mask: Tensor | None = None
) -> Tensor:
    """Logits `[num_tokens, B, vocab]` of a plain loop that names no positions but the mask's."""
    cache = DynamicCache() if cache is None else cache
    logits = []
    for _ in range(num_tokens):
        extra = {}
        if mask is not None:
            extra = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
            extra["position_ids"] = extra["position_ids"][:, -ids.shape[1] :]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=-1)
        logits.append(model(ids, past_key_values=cache, logits_to_keep=1, **extra).logits[:, -1])
        ids = logits[-1].argmax(-1, keepdim=True)
    return torch.stack(logits)


def generated(model: Any, ids: Tensor, num_tokens: int, **options: Any) -> Any:
    return model.generate(
        ids,
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


def real_columns(layer: EvictingLayer) -> list[list[list[int]]]:
    return [
        [[column for column in group if column >= 0] for group in sequence]
        for sequence in layer.positions.tolist()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_below_the_threshold_generate_gives_the_bits_of_the_unpatched_model(kind: str) -> None:
    model = tiny_lm(kind)
    want = generated(model, prompt(8), 12)
    install_kv_eviction(model, budget=14, n_sink=2, n_recent=3)  # 8 + 11 cached tokens fit
    got = generated(model, prompt(8), 12)
    assert torch.equal(torch.stack(got.logits), torch.stack(want.logits))
    assert got.past_key_values.layers[0].num_rows == 19
    remove_kv_eviction(model)
    install_kv_eviction(model, **SIZES)
    other = generated(model, prompt(8), 12)
    assert not torch.equal(torch.stack(other.logits), torch.stack(want.logits))


def test_remove_gives_the_model_back_as_it_was() -> None:
    model = tiny_lm("llama")

    def anatomy() -> list[tuple[str, tuple[str, ...], int]]:
        return [
            (name, tuple(vars(module)), len(module._forward_hooks) + len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        ]

    before, want = anatomy(), decode(model, prompt(8), 12)
    install_kv_eviction(model, **SIZES)
    evicted = decode(model, prompt(8), 12)
    assert anatomy() != before
    assert not torch.equal(evicted, want)
    remove_kv_eviction(model)
    assert anatomy() == before
    assert torch.equal(decode(model, prompt(8), 12), want)


SHARED = [(kind, False, *rest) for kind in KINDS for rest in ((1, 0), (3, 4))]
PER_HEAD = [(kind, True, 1, 4) for kind in KINDS if kind != "deepseek_v3"]  # which has no heads


@pytest.mark.parametrize(("kind", "per_head", "evict_every", "padding"), SHARED + PER_HEAD)
def test_evicting_equals_a_full_cache_where_the_evicted_are_masked(
    kind: str, per_head: bool, evict_every: int, padding: int
) -> None:
    """Selection, gathering, positions, masks and scores at once, against H2O written twice."""
    ids = prompt(12, batch=2)
    mask = torch.ones_like(ids)
    ids[1, :padding], mask[1, :padding] = 0, 0
    reference = ReferenceH2O(
        budget=3,
        num_sink=2,
        num_recent=3,
        evict_every=evict_every,
        num_groups=2 if per_head else 1,
        paddings=(0, padding),
    )
    model = tiny_lm(kind, dtype=torch.float64)
    reference.install(model)
    want = decode(model, ids, 12, mask=mask)
    model, cache = tiny_lm(kind, dtype=torch.float64), DynamicCache()
    install_kv_eviction(model, **SIZES, evict_every=evict_every, per_head=per_head)
    got = decode(model, ids, 12, cache=cache, mask=mask)
    torch.testing.assert_close(got, want, rtol=0, atol=FP64_CONTRACT)
    for index, layer in enumerate(cache.layers):
        assert real_columns(layer) == reference.kept[index]
        masses = [
            [[mass[column] for column in columns] for mass, columns in zip(*pair, strict=True)]
            for pair in zip(reference.mass[index], reference.kept[index], strict=True)
        ]
        want_mass = torch.tensor(masses, dtype=torch.float64)
        torch.testing.assert_close(layer.rows.mass, want_mass, rtol=0, atol=FP64_CONTRACT)


def test_the_latent_and_the_rope_key_of_deepseek_lose_the_same_rows() -> None:
    model, cache, full = tiny_lm("deepseek_v3"), DynamicCache(), DynamicCache()
    decode(model, prompt(12), 1, cache=full)
    install_kv_eviction(model, **SIZES)
    decode(model, prompt(12), 1, cache=cache)
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        assert layer.keys.shape == (1, 1, CAPACITY, 12)
        assert layer.values.shape == (1, 1, CAPACITY, 8)
        rows = layer.positions[0, 0]
        # The deeper layers of the two runs agree too: a prefill attends before anything leaves.
        assert torch.equal(layer.keys, whole.keys[:, :, rows])
        assert torch.equal(layer.values, whole.values[:, :, rows])


class NaiveSlice:
    """What not to do: cut the oldest rows off a `DynamicCache` and tell nobody."""

    def __init__(self, model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.register_forward_hook(self._cut, with_kwargs=True)

    def _cut(self, attention: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs["past_key_values"].layers[attention.layer_idx]
        layer.keys = layer.keys[:, :, -CAPACITY:]
        layer.values = layer.values[:, :, -CAPACITY:]


def fed_positions(model: Any) -> list[int]:
    """Fills up with the last position of every forward."""
    seen: list[int] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        seen.append(int(position_ids[0, -1]))

    model.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_positions_go_on_counting_in_generate_and_in_a_loop(kind: str) -> None:
    """A loop that names no positions shows what `generate()` hides: a naive slice repeats them."""
    naive = tiny_lm(kind)
    NaiveSlice(naive)
    seen = fed_positions(naive)
    decode(naive, prompt(12), 5)
    assert seen == [11, 8, 8, 8, 8]

    model = tiny_lm(kind)
    install_kv_eviction(model, **SIZES)
    seen = fed_positions(model)
    from_loop = decode(model, prompt(12), 5)
    assert seen == [11, 12, 13, 14, 15]
    seen.clear()
    from_generate = generated(model, prompt(12), 5)
    assert seen == [11, 12, 13, 14, 15]
    assert torch.equal(torch.stack(from_generate.logits), from_loop)
    assert from_generate.past_key_values.get_seq_length() == 16


@pytest.mark.parametrize("evict_every", [1, 4])
def test_rows_between_steps_never_exceed_the_promised_peak(evict_every: int) -> None:
    model, cache = tiny_lm("llama"), DynamicCache()
    install_kv_eviction(model, **SIZES, evict_every=evict_every)
    seen = []
    ids = prompt(20)
    for _ in range(10):
        ids = decode(model, ids, 1, cache=cache).argmax(-1).T
        seen.append([layer.num_rows for layer in cache.layers])
        assert seen[-1] == [layer.keys.shape[2] for layer in cache.layers]
    peak = CAPACITY + evict_every - 1
    assert seen[0] == [CAPACITY, CAPACITY]  # the prefill is evicted as well
    assert max(map(max, seen)) == peak
    assert [rows for rows, _ in seen[1:6]] == [CAPACITY + n % evict_every for n in range(1, 6)]


def test_a_second_generation_is_that_of_a_fresh_model() -> None:
    first, second = prompt(14, seed=1), prompt(14, seed=2)
    fresh, used = tiny_lm("llama"), tiny_lm("llama")
    install_kv_eviction(fresh, **SIZES)
    install_kv_eviction(used, **SIZES)
    want = decode(fresh, second, 10)
    cache = DynamicCache()
    decode(used, first, 10, cache=cache)
    assert torch.equal(decode(used, second, 10), want)  # a new cache has no past
    cache.reset()
    assert torch.equal(decode(used, second, 10, cache=cache), want)  # nor has a reset one


def test_left_padding_changes_nothing_and_is_never_a_sink() -> None:
    model = tiny_lm("qwen3", dtype=torch.float64)
    install_kv_eviction(model, **SIZES)
    ids = prompt(14, batch=2)
    ids[1, :9] = 0  # five real tokens: fewer than the layer keeps
    padded = generated(model, ids, 10, attention_mask=(ids > 0).long())
    for row, length in ((0, 14), (1, 5)):
        alone = generated(model, ids[row : row + 1, -length:], 10)
        got, want = torch.stack(padded.logits)[:, row], torch.stack(alone.logits)[:, 0]
        torch.testing.assert_close(got, want, rtol=0, atol=FP64_CONTRACT)
    for layer in padded.past_key_values.layers:
        assert layer.positions[1, 0, :2].tolist() == [9, 10]
        assert layer.positions.min() == 0  # nine tokens later all padding has left


def test_a_hole_in_the_mask_is_as_if_its_token_had_never_been() -> None:
    """Rows and columns lie apart here, so a mask that is cut instead of looked up is wrong."""
    model, ids = tiny_lm("llama", dtype=torch.float64), prompt(9)
    mask = torch.ones_like(ids)
    mask[0, [3, 6]] = 0  # seven tokens and a hole stay after the prefill
    install_kv_eviction(model, **SIZES)
    got = decode(model, ids, 6, mask=mask)
    want = decode(model, ids[:, mask[0] > 0], 6)
    torch.testing.assert_close(got, want, rtol=0, atol=FP64_CONTRACT)


def test_beams_take_their_rows_and_scores_along() -> None:
    model, cache = tiny_lm("llama"), DynamicCache()
    install_kv_eviction(model, **SIZES)
    decode(model, prompt(14, batch=2), 3, cache=cache)
    layer = cache.layers[1]
    rows, keys = layer.rows, layer.keys
    assert not torch.equal(rows.columns[0], rows.columns[1])
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(layer.rows.columns, rows.columns[[1, 1]])
    assert torch.equal(layer.rows.mass, rows.mass[[1, 1]])
    assert torch.equal(layer.keys, keys[[1, 1]])
    beams = generated(model, prompt(14), 8, num_beams=3)
    assert beams.past_key_values.layers[0].num_rows == CAPACITY


@pytest.mark.parametrize(
    ("take", "want"),
    [
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    ],
    ids=["select", "repeat"],
)
def test_sequences_take_all_that_is_known_of_their_rows_along(
    take: Callable[[DynamicCache], None], want: list[int]
) -> None:
    model, ids, cache = tiny_lm("llama"), prompt(5, batch=2), DynamicCache()
    install_kv_eviction(model, **SIZES)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # the second is padded, so that it has other rows
    decode(model, ids, 1, cache=cache, mask=mask)
    before = [(layer.positions, layer.rows.mass, layer.keys) for layer in cache.layers]
    assert not torch.equal(*before[0][0])
    take(cache)
    for layer, known in zip(cache.layers, before, strict=True):
        now = (layer.positions, layer.rows.mass, layer.keys)
        assert all(torch.equal(a, b[want]) for a, b in zip(now, known, strict=True))


def test_the_cache_of_a_shared_prompt_can_be_copied_and_continued_twice() -> None:
    model, cache = tiny_lm("llama"), DynamicCache()
    install_kv_eviction(model, **SIZES)
    decode(model, prompt(14), 1, cache=cache)
    copies = [copy.deepcopy(cache) for _ in range(2)]
    first, second = (decode(model, prompt(3, seed=9), 8, cache=one) for one in copies)
    assert torch.equal(first, second)
    assert torch.equal(first, decode(model, prompt(3, seed=9), 8, cache=cache))


def test_without_a_cache_nothing_is_watched_or_changed() -> None:
    model = tiny_lm("llama")
    want = model(prompt(14), use_cache=False).logits
    install_kv_eviction(model, **SIZES)
    assert torch.equal(model(prompt(14), use_cache=False).logits, want)
