"""The typed settings of one rank; the only reader of the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from scope_contracts.errors import UserInputError

RECOMPUTE_NEVER = 999_999


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What the environment says about this rank. Compared across ranks where it must agree."""

    launched: bool = False
    """Whether a launcher (ours or torchrun) started this process as a rank."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    tp_plan: str | None = None
    pp_enabled: bool | None = None
    kv_bias_backend: str = "sdpa"
    kv_cache_recompute_every: int = RECOMPUTE_NEVER
    tp_allow_compile: bool = False
    start_timeout_s: float = 300.0
    """How long ranks wait for each other to come, to load the model, and at the end."""
    group_timeout_s: float = 60.0
    """Bound of every transfer, every collective, and of rank0's wait for a chunk."""
    idle_timeout_s: float = 3600.0
    """How long a mesh rank waits for its next envelope before it gives up on rank0."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the settings.

        Raises:
            UserInputError: a variable does not parse; the sentence names it.
        """
        env = os.environ if environ is None else environ
        return cls(
            launched="RANK" in env,
            rank=_integer(env, "RANK", 0),
            world_size=_integer(env, "WORLD_SIZE", 1),
            local_rank=_integer(env, "LOCAL_RANK", 0),
            tp_plan=env.get("SCOPE_TP_PLAN"),
            pp_enabled=_switch(env, "SCOPE_PP_ENABLED", None),
            kv_bias_backend=env.get("SCOPE_KV_BIAS_BACKEND", "sdpa"),
            kv_cache_recompute_every=_integer(
                env, "SCOPE_KV_CACHE_RECOMPUTE_EVERY", RECOMPUTE_NEVER
            ),
            tp_allow_compile=bool(_switch(env, "SCOPE_TP_ALLOW_COMPILE", False)),
            start_timeout_s=_seconds(env, "SCOPE_START_TIMEOUT_S", 300.0),
            group_timeout_s=_seconds(env, "SCOPE_GROUP_TIMEOUT_S", 60.0),
            idle_timeout_s=_seconds(env, "SCOPE_IDLE_TIMEOUT_S", 3600.0),
        )


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserInputError(f"{name} is {text!r}; give a whole number") from None


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserInputError(f"{name} is {text!r}; give a positive number of seconds")
    return value


def _switch(env: Mapping[str, str], name: str, default: bool | None) -> bool | None:
    text = env.get(name)
    if text is None:
        return default
    if text not in ("0", "1"):
        raise UserInputError(f"{name} is {text!r}; set it to 0 or 1")
    return text == "1"
