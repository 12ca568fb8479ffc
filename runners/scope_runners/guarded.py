"""Every failure we foresee ends as one sentence and an exit code, no traceback."""

import logging
import os
import signal
import sys
from collections.abc import Callable

from scope_contracts.errors import ScopeError, UserInputError
from scope_runners.exit_codes import BAD_INPUT, FAILED, INTERRUPTED
from scope_runners.standard_streams import open_standard_streams


def guarded(
    command: Callable[[], int], *, speaker: str = "scope-rt", log: logging.Logger | None = None
) -> int:
    """Run `command`; what it raises becomes one sentence of `speaker` and the exit code for it.

    Where there is a `log`, that has the sentence, with the error's name, and nothing is printed.
    """
    open_standard_streams()
    try:
        return command()
    except ScopeError as error:
        if log is not None:
            log.error("%s: %s", type(error).__name__, error)
        else:
            to_read_it = f" (scope-rt runbook {error.runbook})" if error.runbook else ""
            print(f"{speaker}: {error}{to_read_it}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, UserInputError) else FAILED
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        if log is not None:
            log.warning("interrupted")
            return INTERRUPTED
        print(f"{speaker}: interrupted", file=sys.stderr)
        return INTERRUPTED
