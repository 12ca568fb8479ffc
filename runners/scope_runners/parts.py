"""Codecs and text encoders of one's own are registered in a command and in every rank it starts.

The command and its ranks import the same module, each once: what it registers, they all know.
"""

import argparse
import os
import sys
from importlib import import_module

from scope_contracts.errors import UserInputError


def add_parts_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--parts`; `register_parts` does what it says."""
    parser.add_argument(
        "--parts",
        type=_module,
        metavar="MODULE",
        help="a Python module of this folder or of PYTHONPATH that registers codecs and text "
        "encoders of your own when it is imported",
    )


def register_parts(module: str | None) -> None:
    """Import the module of `--parts`, where there is one; a second time in a process does nothing.

    Raises:
        UserInputError: it cannot be imported, or registers a name that is taken.
    """
    if module is None:
        return
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last: a file here must not shadow a library
    try:
        import_module(module)
    except (ImportError, SyntaxError) as error:
        raise UserInputError(
            f"--parts {module}: cannot be imported ({error}); give a module of this folder or of "
            "PYTHONPATH that can"
        ) from error


def _module(text: str) -> str:
    if text.endswith(".py") or not all(word.isidentifier() for word in text.split(".")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of a module; write such as my_parts for my_parts.py"
        )
    return text
