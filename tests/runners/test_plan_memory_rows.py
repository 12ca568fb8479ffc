"""What eviction keeps and what a view copies is planned as real tensors show it."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import DynamicCache

from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.row_storage import Evicting
from scope_contracts.row_view import view_bytes
from scope_contracts.tensor_spec import DType
from scope_rt.collectives import SoloCollectives
from scope_rt.kv_cache.codec import codec_for
from scope_rt.kv_cache.policy import HeavyHitters
from scope_rt.kv_cache.row_store import RowStore
from scope_rt.lm.eviction import install_kv_eviction
from scope_rt.lm.eviction_layer import EvictingLayer, EvictionSettings
from scope_runners.main import main
from tests.lm.eviction_models import LATENT, prompt, tiny_lm
from tests.runners.plan_requests import demanded
from tests.tiny_models import CPU

EVICTION: dict[str, Any] = {"budget": 3, "n_sink": 2, "n_recent": 3, "evict_every": 4}
KEEP = 2 + 3 + 3 + 4 - 1
GROUPED_SIZES = "--layers 2 --heads 4 --kv-heads 2 --head-dim 16"
LATENT_SIZES = f"--layers 2 --latent-rank {LATENT['kv_lora_rank']} --rope-dim 8"


def _storage_of(tensor: Tensor) -> Any:
    """Tells whether it is still alive, and keeps nothing alive."""
    return StorageWeakRef(tensor.untyped_storage())


class LiveBytes(TorchDispatchMode):
    """The most bytes that lived at once beyond those of `known`, while it was entered."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[Any, int]] = {}
        for tensor in known:
            self._see(tensor)
        self._before, self.peak = self._num_bytes(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            self._see(tensor)
        self.peak = max(self.peak, self._num_bytes() - self._before)
        return result

    def _see(self, tensor: Tensor) -> None:
        ref = _storage_of(tensor)
        self._live[ref.cdata] = (ref, tensor.untyped_storage().nbytes())

    def _num_bytes(self) -> int:
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        return sum(num_bytes for _, num_bytes in self._live.values())


@pytest.mark.parametrize("codec", CodecKind)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64])
@pytest.mark.parametrize("is_gathered", [False, True], ids=["in place", "gathered"])
def test_a_view_takes_at_its_peak_what_is_planned(
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
    demand = demanded(given)
    plan = demand.plan()
    assert plan.bytes_of("cache") + plan.bytes_of("columns and scores") == max(held)
    assert 2 * demand.bytes_per_sequence == max(held)


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


def test_eviction_is_told_to_feed_less_at_once_where_its_weights_do_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "plan-memory --model mha-52 --kv-cache h2o --keep 2048 --length 32768 --gpu-gib 24"
    assert main([*given.split(), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    lines = {line["name"]: line for line in printed["lines"]}
    weights = lines["attention weights"]
    assert weights["bytes"] == 24 * 32768 * 32768 * (2 + 4 + 2)
    assert weights["estimate"]
    (change,) = [text for text in printed["changes"] if text.startswith("--prefill-chunk")]
    assert main([*given.split(), *change.split()]) == 0
    one_more = str(int(change.split()[1]) + 1)
    assert main([*given.split(), "--prefill-chunk", one_more]) == 1


def test_heads_that_nobody_told_leave_attention_weights_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["plan-memory", *LATENT_SIZES.split(), "--kv-cache", "h2o", "--keep", "9"])
    assert "not known: nobody said how many heads attend" in capsys.readouterr().out


def test_rows_that_stay_are_cut_no_further_than_needed(capsys: pytest.CaptureFixture[str]) -> None:
    given = "plan-memory --model mha-52 --kv-cache h2o --keep 4096 --batch 32 --prefill-chunk 16"
    assert main([*given.split(), "--gpu-gib", "15", "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert "--kv-cache h2o:int8" in changes
    (change,) = [text for text in changes if text.startswith("--keep")]
    assert main([*given.split(), "--gpu-gib", "15", *change.split()]) == 0
    one_more = str(int(change.split()[1]) + 1)
    assert main([*given.split(), "--gpu-gib", "15", "--keep", one_more]) == 1
