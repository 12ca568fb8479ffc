"""The deployment examples, read as their tools read them; not a test itself."""

import argparse
from pathlib import Path
from typing import Any

import yaml

from scope_rt.environment_names import PER_PROCESS_VARIABLES
from scope_runners.command_parser import CommandParser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "runbooks" / "deploy"


def documents(name: str) -> list[dict[str, Any]]:
    """Every document of a YAML file."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def served(words: list[str]) -> argparse.Namespace:
    """What `scope-rt serve` takes of these words; raises where one is none of its options."""
    from scope_runners.serve.command import add_serve_arguments

    parser = CommandParser()
    add_serve_arguments(parser)
    return parser.parse_args(words)


def known_variables() -> set[str]:
    """The `SCOPE_*` variables that a person may set."""
    from scope_rt.config import variables

    return {*variables(), *PER_PROCESS_VARIABLES}
