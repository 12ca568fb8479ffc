"""What eviction keeps and what a view copies is planned as real tensors show it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.collectives import SoloCollectives
from scope_rt.kv_cache.codec import codec_for
from scope_rt.kv_cache.policy import HeavyHitters
from scope_rt.kv_cache.row_store import RowStore
from scope_rt.kv_cache.row_view import view_bytes
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import PagedStore
from scope_rt.lm.eviction import install_kv_eviction
from scope_rt.lm.eviction_layer import EvictingLayer, EvictionSettings
from scope_rt.lm.specs.row_storage import Evicting
from scope_runners.main import main
from scope_runners.plan_memory.plan import RUNTIME_BYTES
from tests.lab.live_bytes import LiveBytes
from tests.lm.eviction_models import LATENT, prompt, tiny_lm
from tests.runners.plan_memory.plan_requests import required
from tests.tiny_models import CPU

EVICTION: dict[str, Any] = {"budget": 3, "n_sink": 2, "n_recent": 3, "evict_every": 4}
KEEP = 2 + 3 + 3 + 4 - 1
GROUPED_SIZES = "--layers 2 --heads 4 --kv-heads 2 --head-dim 16"
LATENT_SIZES = f"--layers 2 --latent-rank {LATENT['kv_lora_rank']} --rope-dim 8"


@pytest.mark.parametrize("codec", CodecKind)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64])
@pytest.mark.parametrize("is_gathered", [False, True], ids=["in place", "gathered"])
def test_the_peak_of_a_view_is_what_is_planned(
    codec: CodecKind, dtype: DType, is_gathered: bool
) -> None:
    rows = RowFormat.full(heads=3, head_dim=32, value_dim=48, dtype=dtype, codec=codec)
    store = RowStore(rows, num_layers=2, batch=1, num_slots=40, device=CPU)
    slots = torch.tensor([[5, 1, 30, 7], [2, 9, 0, 0]]) if is_gathered else slice(0, 8)
    parts = [part for plane in store.parts for part in plane]
    with LiveBytes(parts) as live:
        shown = store.read(1, slots, batch=0)
    assert [plane.shape[-1] for plane in shown] == [32, 48]
    assert live.peak == 8 * view_bytes(rows, is_gathered=is_gathered)


@pytest.mark.parametrize(
    ("kind", "sizes", "codec"),
    [
        ("llama", GROUPED_SIZES, CodecKind.IDENTITY),
        ("llama", GROUPED_SIZES, CodecKind.INT8),
        ("llama", GROUPED_SIZES, CodecKind.INT4),
        ("deepseek_v3", LATENT_SIZES, CodecKind.IDENTITY),
    ],
)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_what_is_planned_for_eviction_is_the_most_that_its_layers_hold(
    kind: str, sizes: str, codec: CodecKind, dtype: DType
) -> None:
    changes: dict[str, Any] = {"head_dim": 16} if kind == "llama" else {}
    model = tiny_lm(kind, **changes).to(torch.float32 if dtype is DType.FLOAT32 else torch.bfloat16)
    install_kv_eviction(model, **EVICTION, codec=codec)
    cache, held = DynamicCache(), []
    for feed in prompt(30, batch=2).split([18, *[1] * 12], dim=1):
        model(feed, past_key_values=cache)
        held.append(sum(layer.num_bytes for layer in cache.layers))
    name = "h2o" if codec is CodecKind.IDENTITY else f"h2o:{codec}"
    given = f"{sizes} --dtype {dtype} --batch 2 --length 30 --kv-cache {name} --keep {KEEP}"
    requirement = required(given)
    plan = requirement.plan()
    assert plan.bytes_of("cache") + plan.bytes_of("columns and scores") == max(held)
    assert 2 * requirement.bytes_per_sequence == max(held)


@pytest.mark.parametrize("codec", [CodecKind.IDENTITY, CodecKind.INT8, CodecKind.INT4])
@pytest.mark.parametrize("chunk", [1, 30, 70])
def test_a_layer_that_takes_new_rows_needs_what_is_planned(codec: CodecKind, chunk: int) -> None:
    keep, heads, dim = 60, 4, 64
    settings = EvictionSettings(
        policy=HeavyHitters(budget=20, num_sink=10, num_recent=30),
        per_head=False,
        codec=codec_for(codec, CPU),
        collectives=SoloCollectives(),
    )
    layer, known = EvictingLayer(settings), []
    for num_new in (keep, chunk):
        k = torch.zeros(1, heads, num_new, dim, dtype=torch.bfloat16)
        hidden = torch.zeros(1, num_new, 1, dtype=torch.bfloat16)
        layer.announce(hidden, None, cached_heads=heads, group_size=1)
        known = [] if layer.rows is None else [*layer.rows.keys, *layer.rows.values]
        live = LiveBytes([k, *known])
        known.clear()  # so that the layer alone holds them
        with live:
            layer.update(k, k)
    rows = RowFormat.full(heads=heads, head_dim=dim, dtype=DType.BFLOAT16, codec=codec)
    planned, _ = Evicting(keep=keep, prefill_chunk=chunk).working(rows, [None], 1000)
    assert live.peak == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize(("chunk", "keep"), [(None, KEEP), (6, KEEP), (1, KEEP), (6, 100)])
def test_a_step_attends_to_as_many_rows_as_are_planned(
    chunk: int | None, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = tiny_lm("llama"), []
    more = keep - KEEP
    install_kv_eviction(model, **EVICTION | {"budget": EVICTION["budget"] + more})
    observe = EvictingLayer.observe

    def watched(layer: EvictingLayer, weights_BHTK: Tensor) -> None:
        seen.append(tuple(weights_BHTK.shape[2:]))
        observe(layer, weights_BHTK)

    monkeypatch.setattr(EvictingLayer, "observe", watched)
    cache = DynamicCache()
    for feed in prompt(30).split(chunk or 30, dim=1):
        model(feed, past_key_values=cache)
    storage = Evicting(keep=keep, prefill_chunk=chunk)
    fed, rows = (max(sizes) for sizes in zip(*seen, strict=True))
    assert fed == storage.fed_at_once(30)
    slack = EVICTION["evict_every"] - 1 if chunk == 6 and keep == KEEP else 0
    assert rows == storage.rows_at_once(30) - slack, "a longer step follows an eviction"


def test_a_whole_prompt_that_is_encoded_at_once_needs_what_is_planned() -> None:
    heads, dim, num_new, keep = 4, 64, 100, 60
    settings = EvictionSettings(
        policy=HeavyHitters(budget=20, num_sink=10, num_recent=30),
        per_head=False,
        codec=codec_for(CodecKind.INT8, CPU),
        collectives=SoloCollectives(),
    )
    layer, k = EvictingLayer(settings), torch.zeros(1, heads, num_new, dim, dtype=torch.bfloat16)
    layer.announce(torch.zeros(1, num_new, 1), None, cached_heads=heads, group_size=1)
    with LiveBytes([k]) as live:
        layer.update(k, k)
    rows = RowFormat.full(heads=heads, head_dim=dim, dtype=DType.BFLOAT16, codec=CodecKind.INT8)
    storage = Evicting(keep=keep)
    planned, _ = storage.working(rows, [None], num_new)
    kept = keep * (rows.bytes_per_row + storage.marks(DType.BFLOAT16))
    assert live.peak == pytest.approx(kept + planned, rel=0.01), "what stays is the cache's"


def step_bytes(seen: int, fed: int, dtype: DType) -> int:
    """The most that lives at once beside the cache in the last step of two texts."""
    model = tiny_lm("llama").to(torch.float32 if dtype is DType.FLOAT32 else torch.bfloat16)
    install_kv_eviction(model, **EVICTION)
    cache, ids = DynamicCache(), prompt(fed, batch=2)
    model.model(ids, past_key_values=cache)
    for layer in cache.layers:
        layer.num_seen = seen - fed  # as if all that had been fed; none of its rows stayed
    columns = torch.ones(2, seen, dtype=torch.int64)
    columns[1, 0] = 0  # where nothing is padding, all sequences share their flags
    with LiveBytes([columns]) as live:
        model.model(ids, past_key_values=cache, attention_mask=columns)
    peak: int = live.peak
    return peak


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
@torch.no_grad()
def test_a_mask_grows_with_all_tokens_seen_as_is_planned(dtype: DType) -> None:
    fed, lengths = 48, (20_000, 40_000)
    sizes = f"{GROUPED_SIZES} --dtype {dtype} --batch 2 --kv-cache h2o --keep {KEEP}"
    short, long = (
        required(f"{sizes} --prefill-chunk {fed} --length {length}").plan() for length in lengths
    )
    grown = long.bytes_of("attention mask") - short.bytes_of("attention mask")
    assert grown == long.num_bytes - short.num_bytes, "nothing else grows"
    live = [step_bytes(length, fed, dtype) for length in lengths]
    assert live[1] - live[0] == pytest.approx(grown, rel=0.01)
    estimated = sum(line.num_bytes for line in long.lines if line.is_estimate) - RUNTIME_BYTES
    assert live[1] == pytest.approx(estimated, rel=0.1)


def test_what_pages_show_of_windowed_layers_is_planned_as_it_is_gathered(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "sliding_window": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = f"--model {tmp_path} --batch 2 --length 100 --kv-cache paged --block-size 4"
    requirement = required(f"{given} --prefill-chunk 10")
    store = PagedStore(
        requirement.domain.spec.row_format,
        layers=AttnLayerMap.all_of(2),
        num_blocks=30,
        block_size=4,
        device=CPU,
        windows=requirement.domain.spec.windows,
    )
    cache, most = PagedCache(store, [store.start() for _ in range(2)]), 0
    new = torch.zeros(2, 10, 2, 8, dtype=torch.bfloat16)
    for _ in range(10):
        cache.extend([10, 10])
        for layer in range(2):
            cache.append(layer, new, new)
        with LiveBytes([part for plane in store.rows.parts for part in plane]) as live:
            cache.view(1)
        most = max(most, live.peak)
        cache.advance()
    planned = requirement.plan().bytes_of("view of one layer")
    a_block = 2 * 4 * requirement.domain.spec.row_format.bytes_per_row
    assert 0 <= planned - most <= 2 * a_block
    assert planned == 2 * 6 * 4 * requirement.domain.spec.row_format.bytes_per_row, "not 100 rows"


def test_advice_for_eviction_is_to_feed_less_at_once_where_its_weights_do_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "plan-memory --model mha-52 --kv-cache h2o --keep 2048 --length 32768 --gpu-gib 24"
    assert main([*given.split(), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    lines = {line["name"]: line for line in printed["ranks"][0]["lines"]}
    weights = lines["attention weights"]
    assert weights["bytes"] == 24 * 32768 * 32768 * (2 + 4 + 2)
    assert weights["estimate"]
    (change,) = [text for text in printed["changes"] if text.startswith("--prefill-chunk")]
    assert main([*given.split(), *change.split()]) == 0
    one_more = str(int(change.split()[1]) + 1)
    assert main([*given.split(), "--prefill-chunk", one_more]) == 1


def test_heads_that_were_not_given_leave_attention_weights_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["plan-memory", *LATENT_SIZES.split(), "--kv-cache", "h2o", "--keep", "9"])
    assert "not known without the number of heads; give a model folder" in capsys.readouterr().out


def test_rows_that_stay_are_cut_no_further_than_needed(capsys: pytest.CaptureFixture[str]) -> None:
    given = "plan-memory --model mha-52 --kv-cache h2o --keep 4096 --batch 32 --prefill-chunk 16"
    assert main([*given.split(), "--gpu-gib", "15", "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert "--kv-cache h2o:int8" in changes
    (change,) = [text for text in changes if text.startswith("--keep")]
    assert main([*given.split(), "--gpu-gib", "15", *change.split()]) == 0
    one_more = str(int(change.split()[1]) + 1)
    assert main([*given.split(), "--gpu-gib", "15", "--keep", one_more]) == 1
