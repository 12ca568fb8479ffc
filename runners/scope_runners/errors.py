"""How every command ends: a ScopeError becomes one sentence on stderr and an exit code."""

import sys
from collections.abc import Callable

from scope_contracts.errors import ScopeError, UserInputError

EXIT_USER_INPUT = 2
EXIT_FAILURE = 1


def reported(run: Callable[[], int]) -> int:
    """Run a command and return its exit code: 2 for what the user can change, 1 for a failure."""
    try:
        return run()
    except UserInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_INPUT
    except ScopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILURE
