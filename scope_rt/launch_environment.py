"""What a launcher tells one process: its rank, where the ranks meet, and how often they started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from scope_contracts.errors import UserInputError
from scope_rt.environment_names import AFTER_WRONG, RESTARTS_AFTER_PROGRESS, UNSAID
from scope_rt.stream_secret import StreamSecret


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """The variables of torchrun, or of our own launcher, for this process alone."""

    launched: bool = False
    """Whether a launcher (ours or torchrun) started this process as a rank."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 0
    """Ranks on this host; 0 is not known."""
    master_addr: str | None = None
    """Where the ranks meet; None outside a launcher."""
    master_port: int = 0
    store_is_hosted: bool = False
    """Whether the launcher hosts the store in which the ranks meet; rank0 does otherwise."""
    run_id: str | None = None
    """torchrun's --rdzv-id, the same for every start of its ranks, where one was given."""
    attempt: int = 0
    """How often the group was started again."""
    may_restart: bool = False
    """Whether the launcher would start the group again after a failure now."""
    restarts_after_progress: bool = False
    """Whether it does so in any case once this start has brought the work forward."""
    is_after_wrong: bool = False
    """Whether a rank of the start before ended by an error of integrity: after another one none
    follows, unless this start has brought the work forward."""
    wrong_is_unsaid: bool = False
    """Whether rank0 may have been lost then before it retracted what that speaks against."""
    secret: StreamSecret | None = None
    """By which the ranks of one stream know each other; None where no one was given."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the variables.

        Raises:
            UserInputError: a variable, or the file of one, cannot be used; the sentence names it.
        """
        env = os.environ if environ is None else environ
        attempt = _integer(env, "TORCHELASTIC_RESTART_COUNT", 0)
        return cls(
            launched="RANK" in env,
            rank=_integer(env, "RANK", 0),
            world_size=_integer(env, "WORLD_SIZE", 1),
            local_rank=_integer(env, "LOCAL_RANK", 0),
            local_world_size=_integer(env, "LOCAL_WORLD_SIZE", 0),
            master_addr=env.get("MASTER_ADDR"),
            master_port=_port(env, "MASTER_PORT"),
            store_is_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            run_id=_given(env, "TORCHELASTIC_RUN_ID"),
            attempt=attempt,
            may_restart=attempt < _integer(env, "TORCHELASTIC_MAX_RESTARTS", 0),
            restarts_after_progress=env.get(RESTARTS_AFTER_PROGRESS) == "1",
            is_after_wrong=env.get(AFTER_WRONG, "0") != "0",
            wrong_is_unsaid=env.get(AFTER_WRONG) == UNSAID,
            secret=StreamSecret.from_environment(env),
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
