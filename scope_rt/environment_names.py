"""A misspelt `SCOPE_*` variable is refused, never ignored: the setting it meant would not hold."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from scope_contracts.errors import UserInputError

PREFIX = "SCOPE_"
LOG_LEVEL = "SCOPE_LOG_LEVEL"
"""Read where a command sets up its log, and no part of a stream's configuration."""
SECRET, SECRET_FILE = "SCOPE_STREAM_SECRET", "SCOPE_STREAM_SECRET_FILE"
"""Read with what the launcher says, and no part of a configuration: that is compared and logged."""
SERVE_TOKEN = "SCOPE_SERVE_TOKEN"
"""Read by `scope-rt serve` and `scope-rt top`; ranks are not given it."""
PER_PROCESS_VARIABLES = frozenset({LOG_LEVEL, SECRET, SECRET_FILE, SERVE_TOKEN})
BREAK_IT_VARIABLES = ("SCOPE_FAULTS", "SCOPE_DISARM")
RESTARTS_AFTER_PROGRESS = "SCOPE_RESTARTS_AFTER_PROGRESS"
AFTER_WRONG, UNSAID = "SCOPE_AFTER_INTEGRITY_ERROR", "unsaid"
"""0, 1, or that rank0 was lost before it could retract."""
INTERNAL_VARIABLES = frozenset({RESTARTS_AFTER_PROGRESS, AFTER_WRONG, *BREAK_IT_VARIABLES})
"""No settings of a person: the launcher, the break-it suite and tests give them to ranks."""


def unknown_variables(environ: Mapping[str, str], settings: Collection[str]) -> dict[str, str]:
    """The `SCOPE_*` variables of `environ` that nothing reads.

    Args:
        environ: names and values, such as `os.environ`.
        settings: the variables that the configuration reads.

    Returns:
        For each unknown variable the nearest one that a person may set, "" where none is near.
    """
    names = sorted(
        name
        for name in environ
        if name.startswith(PREFIX)
        and name not in {*settings, *PER_PROCESS_VARIABLES, *INTERNAL_VARIABLES}
    )
    offered = sorted({*settings, *PER_PROCESS_VARIABLES})
    nearest = {name: get_close_matches(name, offered, n=1, cutoff=0.75) for name in names}
    return {name: near[0] if near else "" for name, near in nearest.items()}


def refuse_unknown_variables(environ: Mapping[str, str], settings: Collection[str]) -> None:
    """Raises `UserInputError`, naming the first unknown variable and the nearest one."""
    for name, nearest in unknown_variables(environ, settings).items():
        fix = f"did you mean {nearest}?" if nearest else "unset it;"
        raise UserInputError(
            f"{name} is no variable of scope-rt; {fix} runbooks/settings.md lists all"
        )
