"""Every failure we foresee ends as one sentence and an exit code, no traceback."""

import os
import signal
import sys
from collections.abc import Callable

from scope_contracts.errors import ScopeError, UserInputError
from scope_runners.exit_codes import BAD_INPUT, FAILED, INTERRUPTED


def guarded(command: Callable[[], int], *, speaker: str = "scope-rt") -> int:
    """Run `command`; what it raises becomes one sentence of `speaker` and the exit code for it."""
    try:
        return command()
    except ScopeError as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, UserInputError) else FAILED
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"{speaker}: interrupted", file=sys.stderr)
        return INTERRUPTED
