"""Packages that only some models need: whoever lacks one is told which, and how to get it."""

from importlib.util import find_spec

from scope_contracts.errors import UserInputError


def need(package: str, *, purpose: str) -> None:
    """Say in one sentence that `package` is missing; imports nothing.

    Raises:
        UserInputError: it is not installed.
    """
    if find_spec(package) is None:
        raise UserInputError(
            f"{purpose} needs {package}, which is not installed; install scope-rt[wan]"
        )
