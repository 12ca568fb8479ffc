"""Every failure we foresee ends as one sentence and an exit code, no traceback."""

import os
import signal
import sys
from collections.abc import Callable

from scope_contracts.errors import ScopeError, UserInputError
from scope_runners.exit_codes import BAD_INPUT, FAILED, INTERRUPTED

_COMMAND = "scope-rt"


def guarded(command: Callable[[], int], *, speaker: str = _COMMAND) -> int:
    """Run `command`; what it raises becomes one sentence of `speaker` and the exit code for it."""
    try:
        return command()
    except ScopeError as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        if error.runbook is not None and speaker == _COMMAND:  # once, not by every rank
            print(f"{speaker}: to read it: scope-rt runbook {error.runbook}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, UserInputError) else FAILED
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"{speaker}: interrupted", file=sys.stderr)
        return INTERRUPTED
