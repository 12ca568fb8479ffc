"""A mistyped command is refused in one sentence that names what was mistyped, before anything else.

argparse would first complain about what is missing (`--prompt`, for a typed `--promt`), and would
take any unique beginning of an option for the option.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from scope_contracts.errors import UserInputError, shown
from scope_runners.wording import nearest


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, raised like every other input error.

    Options are written in full. Raises `UserInputError`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"allow_abbrev": False} | options))

    def error(self, message: str) -> NoReturn:
        raise UserInputError(f"{_in_plain_words(message)}; see {self.prog} --help")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        args = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(args)
        return super().parse_known_args(args, namespace)

    def _refuse_unknown(self, args: Sequence[str]) -> None:
        """Name the first word that is no option, or no command, of this parser."""
        commands = self._commands()
        for word in args:
            if word == "--":
                return
            if not word.startswith("-") or " " in word or _is_number(word):
                if commands is None:
                    continue  # a value, or a file
                if word not in commands:
                    self.error(_unknown("command", word, commands))
                return  # the rest is the command's own
            name = word.partition("=")[0]
            known = self._option_string_actions
            if word != "-" and name not in known and (name[:2] == "--" or name[:2] not in known):
                self.error(_unknown("option", name, known))

    def _commands(self) -> Iterable[str] | None:
        """The names of subcommands; None where this parser has none."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return list(action.choices)
        return None


def _in_plain_words(message: str) -> str:
    """argparse names the Python type that a value is not."""
    for kind, wanted in (("int", "a whole number"), ("float", "a number"), ("Path", "a path")):
        message = message.replace(f"invalid {kind} value:", f"give {wanted}, not")
    return message.removeprefix("argument ")


def _unknown(kind: str, word: str, known: Iterable[str]) -> str:
    return f"there is no {kind} {shown(word)}{nearest(word, known)}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
