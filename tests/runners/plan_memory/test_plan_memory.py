"""The command reproduces known figures, plans what is then allocated, and names what to change."""

import json
import re
from inspect import signature
from pathlib import Path

import pytest
import torch

from scope_contracts.cache_spec import CacheChoice
from scope_contracts.row_format import CodecKind
from scope_contracts.tensor_spec import DType
from scope_rt.collectives import SoloCollectives
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.lm.cache.domains import CacheDomains
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import PagedStore, num_blocks_in
from scope_rt.lm.decode_loop import DecodeLoop
from scope_rt.lm.specs.row_storage import PREFILL_CHUNK, Paged
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_runners.main import main
from scope_runners.plan_memory import presets
from scope_runners.plan_memory.serving import ServingRequirement
from tests.runners.plan_memory.plan_requests import required, required_of_video

CPU = torch.device("cpu")


def planned(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Bytes by line of a rank that generates, and the figures beside them."""
    main(["plan-memory", "--json", *arguments.split()])
    printed = json.loads(capsys.readouterr().out)
    rank = printed["ranks"][-1]
    return {line["name"]: line["bytes"] for line in rank["lines"]} | {
        "total_bytes": rank["total_bytes"],
        "bytes_per_token": printed["bytes_per_token"],
        "bytes_per_sequence": printed["bytes_per_sequence"],
    }


@pytest.mark.parametrize(
    ("preset", "token", "sequence", "batch", "eight"),
    [
        ("mla-52", 14_976, 122_683_392, 981_467_136, 7_851_737_088),
        ("mha-52", 159_744, 1_308_622_848, 10_468_982_784, 83_751_862_272),
    ],
)
def test_the_specialists_figures(
    preset: str,
    token: int,
    sequence: int,
    batch: int,
    eight: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = planned(f"--model {preset} --batch 8", capsys)
    assert (one["bytes_per_token"], one["bytes_per_sequence"]) == (token, sequence)
    assert one["cache"] == batch
    assert planned(f"--model {preset} --batch 8 --models 8", capsys)["cache"] == eight


def test_sizes_typed_give_what_the_preset_gives(capsys: pytest.CaptureFixture[str]) -> None:
    latent = "--layers 52 --attention-layers 13 --latent-rank 512 --rope-dim 64 --batch 8"
    assert planned(latent, capsys) == planned("--model mla-52 --batch 8", capsys)
    full = "--layers 52 --attention-layers 13 --heads 24 --head-dim 128 --kv-cache contiguous"
    assert planned(full, capsys) == planned("--model mha-52", capsys)
    video = "--layers 40 --heads 40 --head-dim 128 --ffn-dim 13824 --window 6"
    assert planned(video, capsys) == planned("--model krea-14b", capsys)


@pytest.mark.parametrize(
    ("arguments", "cache_gb"),
    [
        ("--model krea-14b", 7.7),
        ("--model wan-14b", 26.8),
        ("--model wan-14b --plan pp0 --tp 2", 13.4),
        ("--model wan-14b --kv-cache paged", 26.8),
        ("--model wan-14b --kv-cache quantized:int8", 13.6),
        ("--model wan-14b --kv-cache quantized:int4", 10.1),
    ],
)
def test_a_video_caches_figures(
    arguments: str, cache_gb: float, capsys: pytest.CaptureFixture[str]
) -> None:
    in_half = f"{arguments} --dtype bfloat16"
    assert round(planned(in_half, capsys)["cache"] / 1e9, 1) == cache_gb


@pytest.mark.parametrize("kind", ["ring", "quantized:int8", "h2o", "paged", "hierarchical"])
def test_what_is_planned_for_the_embedded_model_is_what_is_allocated(kind: str) -> None:
    requirement = required_of_video(f"--model {EMBEDDED} --kv-cache {kind}")
    choice = CacheChoice.named(kind)
    assert (requirement.spec.kind, requirement.spec.codec) == (choice.kind, choice.codec)
    plan, cache = requirement.plan(), open_frame_cache(requirement.spec, device=CPU)
    assert plan.bytes_of("cache") == cache.num_bytes
    folder = ModelFolder.open(EMBEDDED)
    model = folder.transformer(SoloCollectives(), dtype=torch.float32, device=CPU)
    assert plan.bytes_of("weights") == sum(p.nbytes for p in model.parameters())
    text = model.text_kv(folder.text_encoder()(["a red circle"])[:, None])
    assert plan.bytes_of("text keys and values") == sum(t.k.nbytes + t.v.nbytes for t in text)


HYBRID = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "layer_types": ["full_attention", "linear_attention", "full_attention"],
}
WINDOWED = HYBRID | {
    "layer_types": ["sliding_attention", "linear_attention", "full_attention"],
    "sliding_window": 8,
}


def stored(requirement: ServingRequirement, layers: AttnLayerMap) -> PagedStore:
    """One pool for every sequence of every model, sized by the store's own count."""
    storage, domain = requirement.storage, requirement.domain
    assert isinstance(storage, Paged)

    def of(num_blocks: int) -> PagedStore:
        return PagedStore(
            domain.spec.row_format.shard(requirement.tp),
            layers=layers,
            num_blocks=num_blocks,
            block_size=storage.block_size,
            device=CPU,
            max_tokens=domain.max_tokens,
            windows=domain.spec.layer_windows,
        )

    a_sequence = of(1).most_blocks(domain.max_tokens, at_once=storage.prefill_chunk)
    return of(requirement.num_domains * domain.batch * a_sequence)


@pytest.mark.parametrize("kind", ["contiguous", "quantized:int8", "paged", "paged:int8"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("config", [HYBRID, WINDOWED], ids=["full", "windowed"])
def test_what_is_planned_for_serving_is_what_is_allocated(
    config: dict[str, object], kind: str, tp: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = f"--model {tmp_path} --mamba2 4x8x8x2x4 --batch 3 --length 100"
    pages = "--block-size 4 --prefill-chunk 16" if "paged" in kind else ""
    requirement = required(f"{sizes} --dtype float32 --tp {tp} --kv-cache {kind} {pages}")
    plan, spec = requirement.plan(), requirement.domain.spec
    layers = AttnLayerMap(num_layers=3, attention_layers=(0, 2))
    domains = CacheDomains(requirement.domain.num_bytes(tp), tp_degree=tp)
    opened = domains.open(requirement.domain, layers=layers, device=CPU)
    assert opened.states is not None
    assert plan.bytes_of("recurrent states") == opened.states.num_bytes
    num_bytes = opened.rows.num_bytes if not pages else stored(requirement, layers).rows.num_bytes
    assert plan.bytes_of("cache") == num_bytes
    assert spec.row_format.codec == (CodecKind.INT8 if "int8" in kind else CodecKind.IDENTITY)


def test_models_side_by_side_take_their_blocks_from_one_pool() -> None:
    sizes = "--layers 2 --heads 2 --head-dim 8 --batch 3 --length 100 --kv-cache paged"
    one, eight = required(sizes), required(f"{sizes} --models 8")
    layers = AttnLayerMap.all_of(2)
    for requirement in (one, eight):
        store, num_bytes = stored(requirement, layers), requirement.plan().bytes_of("cache")
        assert num_bytes == store.rows.num_bytes
        rows, windows = requirement.domain.spec.row_format, requirement.domain.spec.layer_windows
        assert store.pool.num_blocks == num_blocks_in(
            num_bytes, rows, windows=windows, block_size=16
        ), "a budget as planned buys these blocks"
    zero_block = 16 * one.domain.spec.row_bytes(1)
    cached = [requirement.plan().bytes_of("cache") for requirement in (one, eight)]
    assert cached[1] - zero_block == 8 * (cached[0] - zero_block)


def test_sequences_with_windows_grow_to_their_length_in_the_blocks_that_were_planned(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WINDOWED))
    given = f"--model {tmp_path} --batch 2 --length 100 --kv-cache paged"
    requirement = required(f"{given} --block-size 4 --prefill-chunk 10")
    store = stored(requirement, AttnLayerMap(num_layers=3, attention_layers=(0, 2)))
    assert requirement.plan().bytes_of("cache") == store.rows.num_bytes
    cache = PagedCache(store, [store.start() for _ in range(2)])
    rows = torch.zeros(2, 10, 4, 16, dtype=torch.bfloat16)
    most = 0
    for _ in range(10):
        cache.extend([10, 10])
        for layer in (0, 2):
            cache.append(layer, rows, rows)
        cache.advance()
        most = max(most, store.pool.num_blocks - store.pool.num_free)
    assert cache.lengths == (100, 100)
    assert store.pool.num_blocks - most <= 2, "a block or so a sequence, which the offset decides"


def test_a_paged_plan_takes_chunks_and_blocks_as_the_decode_loop_does() -> None:
    assert signature(DecodeLoop).parameters["prefill_chunk"].default == PREFILL_CHUNK
    assert required("--model mha-52 --kv-cache paged").storage == Paged(
        block_size=16, prefill_chunk=PREFILL_CHUNK
    )


def test_advice_keeps_pages_and_is_taken_as_it_is_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["plan-memory", "--model", "mha-52", "--batch", "8", "--models", "8"]
    given += ["--kv-cache", "paged", "--gpu-gib", "60"]
    assert main([*given, "--json"]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert "--kv-cache paged:int8" in changes
    for change in changes:
        assert main([*given, *change.split()]) == 0
    (length,) = [change for change in changes if change.startswith("--length")]
    one_block_more = str(int(length.split()[1]) + 1)
    assert main([*given, "--length", one_block_more]) == 1


@pytest.mark.parametrize(("given", "advised"), [("contiguous", ""), ("quantized:int8", ":int8")])
@pytest.mark.parametrize("is_windowed", [True, False], ids=["windows", "no windows"])
def test_advice_for_layers_with_windows_is_blocks_which_they_give_back(
    given: str, advised: str, is_windowed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ["sliding_attention" if is_windowed else "full_attention"] * 11 + ["full_attention"]
    config = WINDOWED | {"num_hidden_layers": 12, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = f"--model {tmp_path} --length 100000 --batch 99"
    room = 0.8 * planned(f"{sizes} --kv-cache {given}", capsys)["total_bytes"] / 2**30
    typed = ["plan-memory", *sizes.split(), "--gpu-gib", str(room), "--json", "--kv-cache"]
    assert main([*typed, given]) == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert (f"--kv-cache paged{advised}" in changes) is is_windowed
    assert (main([*typed, f"paged{advised}"]) == 0) is is_windowed


def test_models_side_by_side_have_weights_of_their_own() -> None:
    one, three = (
        required(f"--layers 2 --heads 2 --head-dim 8 --weights-gib 1 --models {models}").plan()
        for models in (1, 3)
    )
    assert (one.bytes_of("weights"), three.bytes_of("weights")) == (1 << 30, 3 << 30)


def test_a_total_and_a_verdict_name_what_they_lack(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", "--model", "mla-52", "--gpu", "h100"]) == 0
    shown = capsys.readouterr().out.splitlines()
    (total,) = (line for line in shown if "total" in line)
    assert total.endswith("GiB    without what is not known (weights, recurrent states)")
    assert "  fits 79.65 GiB, without that: 78.53 GiB to spare" in shown


def test_what_is_not_known_is_not_shown_as_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-memory", "--model", "mla-52"]) == 0
    (weights,) = (line for line in capsys.readouterr().out.splitlines() if "weights " in line)
    assert weights.split()[:2] == ["weights", "?"]


@pytest.mark.parametrize("model", ["tiny", "wan-14b"])
def test_every_size_is_in_powers_of_two_and_none_is_shown_as_nothing(
    capsys: pytest.CaptureFixture[str], model: str
) -> None:
    assert main(["plan-memory", "--model", model, "--gpu", "h200"]) == 0
    shown = capsys.readouterr().out
    assert not re.search(r"\b[MG]B\b", shown)
    assert "GiB is 2^30 bytes" in shown
    sizes = [float(size.replace(",", "")) for size in re.findall(r" ([\d.,]+) [GMK]iB", shown)]
    assert sizes
    assert min(sizes) >= 1


def test_the_decoder_of_a_folder_with_wans_own_autoencoder_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known by its number of weights; nothing is known of any other codec."""
    monkeypatch.setattr(ModelFolder, "has_codec", lambda self, name: False)
    workspace = "decode workspace"
    assert planned("--model tiny", capsys)[workspace] == 0
    monkeypatch.setattr(presets, "num_weights_in", lambda folder: 126_892_531)
    assert planned("--model tiny", capsys)[workspace] == 64 * 64 * 2550 * 4


def test_the_table_says_whether_it_fits_and_what_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    half = ["plan-memory", "--model", "wan-14b", "--dtype", "bfloat16"]
    assert main([*half, "--gpu", "h200"]) == 0
    assert "fits 140.40 GiB" in capsys.readouterr().out
    assert main([*half, "--gpu-gib", "66"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit 66.00 GiB: " in shown
    assert "any one of: --plan tp_v1_1 --tp 2; --kv-cache quantized:int8; --window " in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--model krea-14b",
            "no change of --plan tp_v1_1 --tp or --kv-cache or --window or --plan makes it fit",
        ),
        ("--model mla-52", "no change of --length makes it fit"),
        ("--model mla-52 --length 256", "nothing can be changed"),
        ("--model mha-52 --batch 2", "of --tp or --kv-cache or --length or --batch makes it fit"),
        (
            "--model mha-52 --kv-cache h2o --keep 512",
            "of --tp or --kv-cache or --keep or --prefill-chunk or --length makes it fit",
        ),
    ],
)
def test_what_cannot_be_made_to_fit_names_all_that_could_be_changed(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan-memory", *arguments.split(), "--gpu-gib", "0.5"]) == 1
    assert sentence in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--model no/such", "is no preset (krea-14b"),
        ("--model krea-14b --plan pp0 --tp 23", "tp 23 does not divide the model's 40 heads"),
        ("--model krea-14b --plan pp0 --tp 3 --kv-cache h2o", "are not shared evenly by tp 3"),
        ("--model tiny --recipe krea-14", "'krea-14' is no recipe"),
        ("--model krea-14b --length 5", "for language models only: --length; leave it out"),
        ("--model mla-52 --window 5", "for video models only: --window; leave it out"),
        ("--model mla-52 --kv-cache quantized:int8", "keep latent caches at codec identity"),
        ("--model mha-52 --kv-cache latent", "caches full keys and values"),
        ("--model mha-52 --kv-cache ring", "want contiguous, paged"),
        (
            "--model mha-52 --kv-cache quantized:int3",
            "quantized:int3', want a codec of identity, int8",
        ),
        ("--model mha-52 --kv-cache paged:int3", "a codec of identity, int8"),
        ("--model mha-52 --kv-cache contiguous:int8", "want quantized:int8 or paged:int8"),
        ("--model mha-52 --kv-cache quantized:identity", "want contiguous, which keeps all bits"),
        ("--model krea-14b --tp 2", "use tp 1 or plan tp_v1_1, not tp 2"),
        ("--model krea-14b --plan tp_v0", "give tp 2 or more"),
        ("--rope-dim 64", "sizes lack --layers, --latent-rank"),
        ("--latent-rank 64 --rope-dim 8", "sizes lack --layers;"),
        ("--kv-heads 2", "sizes lack --layers, --heads, --head-dim"),
        ("--layers 4 --latent-rank 8 --rope-dim 4 --ffn-dim 16", "leave out --ffn-dim"),
        ("--layers 4 --latent-rank 8 --rope-dim 4 --heads 3", "leave out --heads"),
        ("--layers 4 --heads 4 --head-dim 8 --ffn-dim 16 --kv-heads 2", "leave out --kv-heads"),
        ("--model mha-52 --attention-layers 3", "got --model and --attention-layers"),
        ("--model krea-14b --ffn-dim 100", "got --model and --ffn-dim"),
        ("--layers 2 --heads 2 --head-dim 8 --mamba2 4x8x8x1x4", "all 2 layers attend"),
        ("--model mla-52 --mamba2 48x128x128x8x4 --tp 3", "tp: got 3, want a divisor of 8"),
        ("--model mha-52 --block-size 16", "--block-size belongs to --kv-cache paged"),
        ("--model mha-52 --prefill-chunk 16", "belongs to --kv-cache paged or h2o; leave"),
        ("--model mha-52 --kv-cache paged --keep 9", "--keep belongs to --kv-cache h2o; leave"),
        ("--model mha-52 --kv-cache h2o", "needs --keep, the rows a layer keeps of a sequence"),
        ("--model mla-52 --kv-cache h2o:int8 --keep 9", "keep latent caches at codec identity"),
        (f"--model mha-52 --length {10**400}", "is more than 2,147,483,648"),
        (f"--model krea-14b --window {10**9}", "is more than 10,000"),
        (f"--model krea-14b --sink {10**400}", "is more than 10,000"),
        ("--model krea-14b --sink few", "'few' is not a whole number"),
        ("--model krea-14b --kv-cache bogus", "want one of ring"),
        ("--model krea-14b --height 100", "multiples of 16"),
        ("--model krea-14b --window 2", "at least the chunk's 3"),
        ("--model krea-14b --sink -1", "no negative sink"),
        ("--gpu h300", "or give --gpu-gib"),
        ("--gpu h100 --gpu-gib 80", "give one of them"),
        ("--gpu-gib none", "is not a positive number of GiB"),
        ("--layers 4", "sizes lack --heads, --head-dim"),
        ("--layers 4 --latent-rank 8", "sizes lack --rope-dim"),
        ("--layers 4 --heads 2 --head-dim 8 --attention-layers 5", "at most --layers 4"),
        ("--model mla-52 --layers 4", "give a model or its sizes"),
        ("--model mla-52 --mamba2 4x5", "five sizes"),
        ("--model mla-52 --mamba2 4x5x6x2x1", "at least 2"),
        ("--dtype int8", "is not one of float64"),
        ("--plan tp9", "is not one of single"),
        ("--batch 0", "--batch"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan-memory", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_dtype_is_that_of_rows_too(capsys: pytest.CaptureFixture[str]) -> None:
    for preset in ("mla-52", "krea-14b"):
        half, single = (
            planned(f"--model {preset} --dtype {dtype}", capsys)["cache"]
            for dtype in (DType.BFLOAT16, DType.FLOAT32)
        )
        assert single == 2 * half
