"""The typed settings of one rank; the only reader of the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from scope_contracts.errors import UserInputError
from scope_rt.environment_names import refuse_unknown_variables

RECOMPUTE_NEVER = 999_999
VARIABLES = frozenset(
    {
        "SCOPE_BRING_UP",
        "SCOPE_DIGEST_EVERY",
        "SCOPE_GROUP_TIMEOUT_S",
        "SCOPE_HEARTBEAT_TIMEOUT_S",
        "SCOPE_IDLE_TIMEOUT_S",
        "SCOPE_KV_BIAS_BACKEND",
        "SCOPE_KV_CACHE",
        "SCOPE_KV_CACHE_RECOMPUTE_EVERY",
        "SCOPE_PP_ENABLED",
        "SCOPE_SLOW_RANK_FACTOR",
        "SCOPE_START_TIMEOUT_S",
        "SCOPE_TP_ALLOW_COMPILE",
        "SCOPE_TP_INPUT_DIGEST",
        "SCOPE_TP_PLAN",
    }
)
"""Those of a person; any other `SCOPE_*` variable is refused."""
_MOST = 1e9
"""A wait may be no longer: three decades, which every clock and lock still takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What the environment says about this rank. Compared across ranks where it must agree."""

    launched: bool = False
    """Whether a launcher (ours or torchrun) started this process as a rank."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str | None = None
    """Where the ranks meet; None outside a launcher."""
    master_port: int = 0
    store_is_hosted: bool = False
    """Whether the launcher hosts the store in which the ranks meet; rank0 does otherwise."""
    tp_plan: str | None = None
    pp_enabled: bool | None = None
    kv_bias_backend: str | None = None
    """Attention backend; None takes the device's default, the same on equal ranks."""
    kv_cache: str | None = None
    """Kind and codec of the cache, as `--kv-cache` takes them; the argument comes first."""
    kv_cache_recompute_every: int | None = None
    """Chunks from one recompute to the next; None leaves it to the model's recipe."""
    tp_allow_compile: bool = False
    digest_every: int = 64
    """Chunks from one comparison of the generator ranks to the next."""
    bring_up: bool = False
    """Whether rank0 sends the text with every chunk, to be compared with what the mesh holds."""
    input_digest: bool = False
    """Whether every frame on a link carries a digest of its bytes."""
    slow_rank_factor: float = 0.0
    """How many times slower than the others a rank may be; 0 never objects."""
    heartbeat_timeout_s: float = 10.0
    """Within this a rank that gives no sign of life is named."""
    start_timeout_s: float = 300.0
    """How long ranks wait for each other to come, to load the model, and at the end."""
    group_timeout_s: float = 60.0
    """Bound of every transfer, every collective, and of rank0's wait for a chunk."""
    idle_timeout_s: float = 3600.0
    """How long a mesh rank waits for its next envelope before it gives up on rank0."""
    run_id: str | None = None
    """torchrun's --rdzv-id, the same for every start of its ranks, where one was given."""
    attempt: int = 0
    """How often the group was started again."""
    may_restart: bool = False
    """Whether the launcher would start the group again after a failure now."""
    restarts_after_progress: bool = False
    """Whether it does so in any case once this start has brought the work forward."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the settings.

        Raises:
            UserInputError: a variable does not parse, or is misspelt; the sentence names it.
        """
        env = os.environ if environ is None else environ
        refuse_unknown_variables(env, VARIABLES)
        return cls(
            launched="RANK" in env,
            rank=_integer(env, "RANK", 0),
            world_size=_integer(env, "WORLD_SIZE", 1),
            local_rank=_integer(env, "LOCAL_RANK", 0),
            master_addr=env.get("MASTER_ADDR"),
            master_port=_port(env, "MASTER_PORT"),
            store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            tp_plan=env.get("SCOPE_TP_PLAN"),
            pp_enabled=_switch(env, "SCOPE_PP_ENABLED", None),
            kv_bias_backend=env.get("SCOPE_KV_BIAS_BACKEND"),
            kv_cache=env.get("SCOPE_KV_CACHE"),
            kv_cache_recompute_every=_count(env, "SCOPE_KV_CACHE_RECOMPUTE_EVERY", None),
            tp_allow_compile=bool(_switch(env, "SCOPE_TP_ALLOW_COMPILE", False)),
            digest_every=_count(env, "SCOPE_DIGEST_EVERY", 64) or 64,
            bring_up=bool(_switch(env, "SCOPE_BRING_UP", False)),
            input_digest=bool(_switch(env, "SCOPE_TP_INPUT_DIGEST", False)),
            slow_rank_factor=_positive(env, "SCOPE_SLOW_RANK_FACTOR", 0.0, unit="times"),
            heartbeat_timeout_s=_positive(env, "SCOPE_HEARTBEAT_TIMEOUT_S", 10.0),
            start_timeout_s=_positive(env, "SCOPE_START_TIMEOUT_S", 300.0),
            group_timeout_s=_positive(env, "SCOPE_GROUP_TIMEOUT_S", 60.0),
            idle_timeout_s=_positive(env, "SCOPE_IDLE_TIMEOUT_S", 3600.0),
            run_id=_given(env, "TORCHELASTIC_RUN_ID"),
            attempt=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0),
            may_restart=_integer(env, "TORCHELASTIC_RESTART_COUNT", 0)
            < _integer(env, "TORCHELASTIC_MAX_RESTARTS", 0),
            restarts_after_progress=bool(_switch(env, "SCOPE_RESTARTS_AFTER_PROGRESS", False)),
        )


def _given(env: Mapping[str, str], name: str) -> str | None:
    """What torchrun was told; it writes "none" where it was told nothing."""
    value = env.get(name, "")
    return None if value in ("", "none") else value


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserInputError(f"{name} is {text!r}; give a whole number") from None


def _port(env: Mapping[str, str], name: str) -> int:
    """0 is none."""
    port = _integer(env, name, 0)
    if not 0 <= port < 2**16:
        raise UserInputError(f"{name} is {env[name]!r}; give a port from 1 to {2**16 - 1}")
    return port


def _count(env: Mapping[str, str], name: str, default: int | None) -> int | None:
    if name not in env:
        return default
    count = _integer(env, name, 0)
    if count < 1:
        raise UserInputError(f"{name} is {env[name]!r}; give a whole number above 0")
    return count


def _positive(env: Mapping[str, str], name: str, default: float, *, unit: str = "seconds") -> float:
    text = env.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _MOST and value != default:
        raise UserInputError(
            f"{name} is {text!r}; give a positive number of {unit}, {_MOST:g} at the most"
        )
    return value


def _switch(env: Mapping[str, str], name: str, default: bool | None) -> bool | None:
    text = env.get(name)
    if text is None:
        return default
    if text not in ("0", "1"):
        raise UserInputError(f"{name} is {text!r}; set it to 0 or 1")
    return text == "1"
