"""The versions that a report of a failure names, found without loading what they are of."""

import argparse
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from scope_rt.version import __version__


class PrintVersions(argparse.Action):
    """An option without a value that prints the versions and ends the command with code 0."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        print(versions())
        parser.exit()


def versions() -> str:
    """Of scope-rt, torch and Python, in one line."""
    return (
        f"scope-rt {__version__}, torch {_installed('torch')}, Python {platform.python_version()}"
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
