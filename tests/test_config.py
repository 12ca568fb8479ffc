"""One configuration: four origins in one order, and every refusal names the setting."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.tensor_spec import DType
from scope_rt.config import StreamConfig, variables
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.stream_identity import check_environment
from scope_rt.stream_setup import StreamSetup
from tests.tiny_folder import write_tiny_folder

FILE = """
[model]
dtype = "bf16"
[mesh]
plan = "pp1"
digest_every = 8
[cache]
kv_cache = "paged"
kv_cache_attention_bias = 1
"""
ENVIRON = {"SCOPE_KV_CACHE": "h2o", "SCOPE_DIGEST_EVERY": "16"}
OTHERS: dict[str, Any] = {
    "model": "/a/model",
    "recipe": "krea-14b",
    "dtype": DType.BFLOAT16,
    "height": 32,
    "width": 64,
    "codec_device": "cpu",
    "codec_dtype": DType.FLOAT16,
    "text_device": "cuda:1",
    "text_dtype": DType.BFLOAT16,
    "text_offload": True,
    "plan": PlanId.PP1,
    "tp": 2,
    "attention_backend": "reference",
    "digest_every": 3,
    "input_digest": False,
    "bring_up": True,
    "allow_compile": True,
    "slow_rank_factor": 4.5,
    "heartbeat_timeout_s": 1.5,
    "start_timeout_s": 2.5,
    "group_timeout_s": 3.5,
    "idle_timeout_s": 4.5,
    "control_device": "cpu",
    "warm_up": True,
    "kv_cache": "paged",
    "kv_cache_attention_bias": 0.5,
    "recompute": "r1",
    "kv_cache_recompute_every": 2,
    "integrity": IntegrityLevel.STRICT,
    "verify_within": 8,
    "image": Path("first.png"),
    "seed": 7,
    "log": Path("log"),
    "record_latents": True,
    "snapshot": Path("snapshot"),
    "resume": True,
    "max_restarts": 1,
    "fallback_tp": 1,
}
"""A value for every setting that is not its default."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "stream.toml"
    path.write_text(FILE)
    return path


def test_an_argument_comes_before_the_environment_before_the_file_before_the_default(
    file: Path,
) -> None:
    config = StreamConfig.load(file=file, environ=ENVIRON, kv_cache="ring", seed=None)
    assert config.cache.kv_cache == "ring", "given in all three"
    assert config.mesh.digest_every == 16, "given in environment and file"
    assert config.mesh.plan is PlanId.PP1, "given in the file"
    assert config.sampling.seed == 0, "given nowhere"


def test_a_file_may_write_a_whole_number_where_a_number_is_meant(file: Path) -> None:
    bias = StreamConfig.load(file=file, environ={}).cache.kv_cache_attention_bias
    assert (bias, type(bias)) == (1.0, float)


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_may_be_named_as_people_name_it(dtype: object) -> None:
    assert StreamConfig.of(dtype=dtype).model.dtype is DType.BFLOAT16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kvcache": "ring"}, r"'kvcache' is no setting; did you mean 'kv_cache'\?"),
        ({"colour": "red"}, "'colour' is no setting; choose one of .*seed"),
        ({"dtype": "bf17"}, "dtype 'bf17' is unknown; choose one of .*float32"),
        ({"plan": "pp9"}, "plan 'pp9' is unknown; choose one of .*pp1"),
        ({"tp": "two"}, "tp: got 'two', want a whole number"),
        ({"tp": True}, "tp: got True, want a whole number"),
        ({"tp": 0}, "tp: got 0, want a number at least 1"),
        ({"seed": 1.5}, "seed: got 1.5, want a whole number"),
        ({"seed": None}, "seed: got None, want a whole number"),
        ({"seed": 2**63}, "seed: got 9223372036854775808, want a number at least 0 and at most"),
        ({"input_digest": 1}, "input_digest: got 1, want true or false"),
        ({"kv_cache_attention_bias": 0.0}, "want a number above 0 and at most 1"),
        ({"kv_cache_attention_bias": float("nan")}, "got nan, want a number above 0"),
        (
            {"group_timeout_s": 0.0},
            r"group_timeout_s \(SCOPE_GROUP_TIMEOUT_S\): got 0.0, .*seconds",
        ),
        (
            {"slow_rank_factor": 0.9},
            r"slow_rank_factor \(SCOPE_SLOW_RANK_FACTOR\): got 0.9, want 0 or a number above 1",
        ),
        ({"environment_plan": "pp1"}, "'environment_plan' is no setting"),
        ({"environment_pipelined": True}, "'environment_pipelined' is no setting"),
        ({"log": 3}, "log: got 3, want a path"),
        ({"snapshot": "snapshot"}, "snapshot needs a stream log; give log as well"),
    ],
)
def test_a_wrong_argument_is_one_sentence_that_names_its_setting(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserInputError, match=message) as caught:
        StreamConfig.of(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[kache]", r"'kache' is no table; did you mean 'cache'\?"),
        ("seed = 7", r"'seed' is no table; write it under \[sampling\]"),
        ("sede = 7", "'sede' is no table; choose one of cache, "),
        ("model = 7", r"model is a table; write \[model\] above its settings"),
        ("[sampling]\nsede = 7", r"\[sampling\] 'sede' is no setting; did you mean 'seed'\?"),
        ("[model]\nseed = 7", r"\[model\] 'seed' is no setting"),
        ("[sampling]\nseed = '7'", r"\[sampling\] seed: got '7', want a whole number"),
        ("[mesh]\nplan = 'pp9'", r"\[mesh\] plan 'pp9' is unknown; choose one of"),
        ("[mesh]\ntp = 0", r"stream.toml: \[mesh\] tp: got 0, want a number at least 1"),
        (
            "[mesh]\ngroup_timeout_s = 0",
            r"stream.toml: \[mesh\] group_timeout_s: got 0.0, want a number above 0",
        ),
        (
            "[mesh]\nslow_rank_factor = 0.5",
            r"slow_rank_factor: got 0.5, want 0 or a number above 1",
        ),
        ("[mesh]\nenvironment_plan = 'pp1'", "'environment_plan' is no setting"),
        ("[mesh", "is no TOML"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "stream.toml"
    path.write_text(text)
    with pytest.raises(UserInputError, match=message) as caught:
        StreamConfig.load(file=path, environ={})
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"none\.toml"):
        StreamConfig.load(file=tmp_path / "none.toml", environ={})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SCOPE_KVCACHE": "ring"}, "SCOPE_KVCACHE is no variable.* did you mean SCOPE_KV_CACHE"),
        ({"SCOPE_BRING_UP": "yes"}, "SCOPE_BRING_UP is 'yes'; set it to 0 or 1"),
        ({"SCOPE_DIGEST_EVERY": "often"}, "SCOPE_DIGEST_EVERY is 'often'; give a whole number"),
        ({"SCOPE_DIGEST_EVERY": "0"}, r"\(SCOPE_DIGEST_EVERY\): got 0, want a number at least 1"),
    ],
)
def test_a_wrong_variable_is_one_sentence_that_names_it(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(UserInputError, match=message):
        StreamConfig.load(environ=environ)


def test_of_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCOPE_KV_CACHE", "h2o")
    assert StreamConfig.of().cache.kv_cache == "ring"
    assert StreamConfig.load().cache.kv_cache == "h2o"


def test_the_settings_of_a_configuration_make_it_again() -> None:
    assert OTHERS.keys() == StreamConfig().settings.keys()
    config = StreamConfig.of(**OTHERS)
    assert config.settings == OTHERS
    assert StreamConfig.of(**config.settings) == config
    default = StreamConfig().settings
    assert not [name for name, value in OTHERS.items() if value == default[name]]


def test_with_settings_changes_what_it_is_given_and_nothing_else() -> None:
    config = StreamConfig.of(seed=5, plan="pp1")
    changed = config.with_settings(seed=6)
    assert changed.settings == config.settings | {"seed": 6}
    assert changed.with_settings(seed=5) == config
    assert StreamConfig.of(tp=2).with_settings(tp=None) == StreamConfig()


def test_what_is_in_effect_is_what_differs_from_the_defaults() -> None:
    assert StreamConfig().in_effect() == "all defaults"
    assert StreamConfig.of(seed=7, tp=2, plan="pp1").in_effect() == "plan=pp1 tp=2 seed=7"


def test_every_variable_gives_one_setting() -> None:
    names = list(variables().values())
    assert len(names) == len(set(names))
    asked = {"environment_plan", "environment_pipelined"}
    assert set(names) <= StreamConfig().settings.keys() | asked


def test_what_only_the_environment_asks_for_is_kept_with_other_settings() -> None:
    config = StreamConfig.load(
        environ={"SCOPE_TP_PLAN": "pp1", "SCOPE_PP_ENABLED": "1"}, plan="pp1"
    )
    changed = config.with_settings(seed=6).mesh
    assert (changed.environment_plan, changed.environment_pipelined) == ("pp1", True)


def test_a_slow_rank_factor_may_be_0_or_above_1() -> None:
    assert StreamConfig.of(slow_rank_factor=0.0).mesh.slow_rank_factor == 0
    assert StreamConfig.of(slow_rank_factor=1.5).mesh.slow_rank_factor == 1.5


def test_what_is_not_supported_is_named_by_its_setting_and_its_variable(tmp_path: Path) -> None:
    setup = StreamSetup.of(
        StreamConfig.of(write_tiny_folder(tmp_path), allow_compile=True), LaunchEnvironment()
    )
    with pytest.raises(UserInputError, match=r"allow_compile \(SCOPE_TP_ALLOW_COMPILE\) is not"):
        check_environment(setup)


def test_a_fallback_degree_is_refused_where_a_plan_has_one_rank(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    with pytest.raises(UserInputError, match="fallback_tp is 1, and plan single runs on one rank"):
        StreamSetup.of(StreamConfig.of(folder, fallback_tp=1), LaunchEnvironment())


def test_after_a_loss_a_stream_has_its_fallback_degree(tmp_path: Path) -> None:
    config = StreamConfig.of(write_tiny_folder(tmp_path), plan="pp1", tp=2, fallback_tp=1)

    def degree(environment: LaunchEnvironment) -> int:
        return StreamSetup.of(config, environment).topology.tp_degree

    assert degree(LaunchEnvironment()) == 2
    assert degree(LaunchEnvironment(attempt=1)) == 1
    assert degree(LaunchEnvironment(attempt=1, launched=True, world_size=2)) == 1
    assert degree(LaunchEnvironment(attempt=1, launched=True, world_size=3)) == 2


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "first"}, "RANK is 'first'; give a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'; give a port"),
    ],
)
def test_a_launcher_that_says_nonsense_is_named_by_its_variable(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(UserInputError, match=message):
        LaunchEnvironment.from_environment(environ)


def test_what_a_launcher_says_is_of_this_process_alone() -> None:
    assert LaunchEnvironment.from_environment({}) == LaunchEnvironment()
    told = {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "2",
    }
    assert LaunchEnvironment.from_environment(told) == LaunchEnvironment(
        launched=True, rank=2, world_size=3, local_rank=1, attempt=1, may_restart=True
    )
