"""A folder's `config.json` is read as its model reads it, or refused by the entry that is not."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CONFIG_MAPPING,
    BambaConfig,
    Cohere2Config,
    Gemma2Config,
    JambaConfig,
    MistralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from scope_contracts.errors import UserInputError
from scope_contracts.tensor_spec import DType
from scope_runners.main import main
from scope_runners.plan_memory.presets import LanguageModel, model_at
from tests.runners.plan_memory.plan_requests import required

SIZES: dict[str, Any] = {"num_hidden_layers": 12, "num_attention_heads": 4, "head_dim": 16}
WRITTEN: dict[str, Any] = {"layer_types": ["full_attention"] * 12}
REFUSED = "is not a language model's"


def read(folder: Path, config: object) -> LanguageModel:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    model = model_at(str(folder), DType.BFLOAT16)
    assert isinstance(model, LanguageModel)
    return model


@pytest.mark.parametrize(
    ("config", "token"),
    [
        ({"num_key_value_heads": 2, "head_dim": 16}, 3 * 2 * 2 * 16 * 2),
        ({"hidden_size": 64}, 3 * 2 * 4 * 16 * 2),
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 8}, 3 * 24 * 2),
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 8, "index_head_dim": 12}, 3 * 36 * 2),
        (
            {"head_dim": 16, "layer_types": ["linear_attention", "mamba", "full_attention"]},
            2 * 4 * 16 * 2,
        ),
    ],
    ids=["grouped", "plain", "latent", "indexed", "hybrid"],
)
def test_a_transformers_folder_is_read(
    config: dict[str, object],
    token: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = {"num_hidden_layers": 3, "num_attention_heads": 4, **config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    assert main(["plan-memory", "--json", "--model", str(tmp_path), "--length", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_per_token"] == token
    (weights,) = [line["bytes"] for line in found["ranks"][0]["lines"] if line["name"] == "weights"]
    assert weights == 1000


@pytest.mark.parametrize(
    ("config_class", "written"),
    [
        (JambaConfig, {"attn_layer_period": 5, "attn_layer_offset": 3}),
        (JambaConfig, {"attn_layer_period": 8}),
        (BambaConfig, {"attn_layer_indices": [2, 7]}),
        (NemotronHConfig, {"hybrid_override_pattern": "M-M*-ME*M-M*"}),
        (Qwen3NextConfig, {"full_attention_interval": 3}),
        (MistralConfig, {"sliding_window": 64}),
        (MistralConfig, {"sliding_window": None}),
        (Gemma2Config, {"sliding_window": 64}),
        (Cohere2Config, {"sliding_window": 64, "sliding_window_pattern": 3}),
        (Qwen2Config, {"sliding_window": 64, "use_sliding_window": False}),
        (
            Qwen2Config,
            {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 5},
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_layers_are_those_that_transformers_makes_of_the_same_entries(
    config_class: type[PreTrainedConfig], written: dict[str, Any], tmp_path: Path
) -> None:
    config = config_class(**SIZES | written)
    kinds = getattr(config, "layer_types", None) or (
        ["sliding_attention" if config.sliding_window else "full_attention"] * 12
    )
    spec = read(tmp_path, SIZES | written | {"model_type": config_class.model_type}).spec
    attending = [kind for kind in kinds if kind in ("full_attention", "sliding_attention")]
    windows = tuple(64 if kind == "sliding_attention" else None for kind in attending)
    assert spec.layer_windows == windows
    assert spec.other_layers == kinds.count("linear_attention")


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("lfm2", {"full_attn_idxs": [2, 5, 8]}),
        ("zamba", {}),
        ("bailing_hybrid", {"layer_group_size": 6}),
        ("kimi_linear", {}),
        ("qwen3_next", {}),
        ("afmoe", {}),
        ("gpt_oss", {}),
        ("vaultgemma", {}),
        ("gemma3n_text", {}),
        ("gemma4_text", {}),
        ("exaone4", {"sliding_window_pattern": 4}),
        ("gemma3_text", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 5}),
        ("jamba", {}),
    ],
)
def test_a_config_that_does_not_write_its_layers_is_read_as_transformers_does_or_refused(
    name: str, entries: dict[str, Any], tmp_path: Path
) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    config = CONFIG_MAPPING[name](**entries)
    kinds = config.layer_types
    unwritten = ("layer_types", "layers_block_type")
    written = {key: value for key, value in config.to_dict().items() if key not in unwritten}
    seen = [kind for kind in kinds if kind in ("full_attention", "sliding_attention")]
    with suppress(UserInputError):
        spec = read(tmp_path, written).spec
        windowed = [window is not None for window in spec.layer_windows]
        assert windowed == [kind == "sliding_attention" for kind in seen]
        assert spec.other_layers == len(kinds) - len(seen)


def test_entries_of_other_rows_that_are_not_used_refuse_nothing(tmp_path: Path) -> None:
    unused = {"num_kv_shared_layers": 0, "global_head_dim": None, "multi_query": False}
    assert read(tmp_path, SIZES | WRITTEN | unused).spec == read(tmp_path, SIZES | WRITTEN).spec


def test_a_window_that_a_qwen_does_not_use_is_none(tmp_path: Path) -> None:
    unused = SIZES | {"sliding_window": 64, "model_type": "qwen2"}
    assert read(tmp_path, unused).spec.windows == ()


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads: got 0, want a whole number of 1"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers: got inf, want a whole number"),
        ({"num_hidden_layers": 10**9}, "want a whole number of 1 to 10000"),
        ({"num_hidden_layers": True}, "num_hidden_layers: got True"),
        ({"num_key_value_heads": -2}, "num_key_value_heads: got -2"),
        ({"head_dim": 10**400}, "head_dim: got 1000"),
        ({"head_dim": None, "hidden_size": 3}, "hidden_size: got 3, want a whole number of 4"),
        ({"kv_lora_rank": 16}, "qk_rope_head_dim: got None"),
        ({"layer_types": [1, 2]}, "layer_types: got [1, 2], want 12 of full_attention"),
        ({"layer_types": [None]}, "layer_types: got [None], want 12 of"),
        ({"layer_types": "full"}, "layer_types: got 'full', want a list"),
        ({"layer_types": ["full_attention"] * 11}, "want 12 of"),
        ({"layer_types": ["chunked_attention"] * 12}, "layer_types: got ['chunked_attention'"),
        ({"layer_types": ["hybrid"] * 12}, "layer_types: got ['hybrid'"),
        ({"layer_types": ["mamba"] * 12}, "want a layer that attends"),
        ({"layer_types": ["sliding_attention"] * 12}, "sliding_window: got None"),
        ({"hybrid_override_pattern": "M*?" * 4}, "hybrid_override_pattern: got ['mamba'"),
        ({"hybrid_override_pattern": "M*"}, "want 12 of"),
        ({"attn_layer_period": 0, "model_type": "jamba"}, "attn_layer_period: got 0"),
        ({"attn_layer_period": 6}, "'attn_layer_period' is of a model whose layers differ"),
        ({"full_attn_idxs": [2, 5]}, "'full_attn_idxs' is of a model whose layers differ"),
        ({"layer_group_size": 6}, "'layer_group_size' is of a model whose layers differ"),
        ({"conv_L_cache": 3}, "'conv_L_cache' is of a model whose layers differ"),
        ({"linear_num_heads": 4}, "'linear_num_heads' is of a model whose layers differ"),
        ({"attention_head_dim": 464}, "'attention_head_dim' is of a model whose rows are others"),
        ({"global_attn_every_n_layers": 4}, "'global_attn_every_n_layers' is of a model whose la"),
        ({"linear_head_dim": 4}, "'linear_head_dim' is of a model whose layers differ"),
        ({"linear_key_head_dim": 4}, "'linear_key_head_dim' is of a model whose layers differ"),
        ({"cca_time0": 2}, "'cca_time0' is of a model whose layers differ"),
        ({"cross_attention_layers": [3]}, "'cross_attention_layers' is of a model whose layers"),
        ({"num_kv_heads": 8}, "'num_kv_heads' is of a model whose rows are others"),
        ({"multi_query": True}, "'multi_query' is of a model whose rows are others"),
        ({"kv_channels": 128}, "'kv_channels' is of a model whose rows are others"),
        ({"attention_head_size": 64}, "'attention_head_size' is of a model whose rows are others"),
        ({"swa_head_dim": 64}, "'swa_head_dim' is of a model whose rows are others"),
        ({"num_heads_per_layer": [4]}, "'num_heads_per_layer' is of a model whose rows are others"),
        ({"v_head_dim": 128}, "'v_head_dim' is of a model whose rows are others"),
        (WRITTEN | {"global_head_dim": 512}, "'global_head_dim' is of a model whose rows are"),
        (WRITTEN | {"num_kv_shared_layers": 4}, "'num_kv_shared_layers' is of a model whose rows"),
        (
            {"sliding_window": 64, "model_type": "afmoe"},
            "sliding_window: got 64 of a 'afmoe' model, and which layers have it is not known",
        ),
        ({"mamba_d_ssm": 128}, "'mamba_d_ssm' is of a model whose layers differ"),
        ({"block_types": ["recurrent", "attention"]}, "'block_types' is of a model whose"),
        ({"sliding_window": "64"}, "sliding_window: got '64'"),
    ],
)
def test_an_entry_that_cannot_be_planned_is_named(
    entries: dict[str, Any],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | entries))
    assert main(["plan-memory", "--model", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert REFUSED in printed
    assert sentence in printed
    assert printed.count("\n") == 1
    assert "give its sizes, as --layers" in printed


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "no json",
        "[" * 100_000,
        '{"num_hidden_layers": 3, "num_attention_heads": 4}',
        '{"num_hidden_layers": 1e400, "num_attention_heads": 4}',
        "\udcff",
    ],
    ids=["empty", "list", "text", "deep", "no sizes", "infinite", "no utf-8"],
)
def test_a_folder_that_is_no_language_models_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    assert main(["plan-memory", "--model", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert REFUSED in printed
    assert printed.count("\n") == 1


def test_eviction_is_refused_where_windows_or_an_indexer_choose_rows(tmp_path: Path) -> None:
    windowed = SIZES | {"sliding_window": 64}
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "index_head_dim": 12}
    for entries, reason in (
        (windowed, "a sliding window, which drops tokens"),
        (SIZES | latent, "indexer chooses among all rows"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(entries))
        with pytest.raises(UserInputError, match=reason):
            required(f"--model {tmp_path} --kv-cache h2o --keep 8")
