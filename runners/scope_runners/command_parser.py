"""A command that was mistyped is refused in one sentence, like every other input error."""

import argparse
from typing import NoReturn

from scope_contracts.errors import UserInputError


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, raised like every other input error."""

    def error(self, message: str) -> NoReturn:
        raise UserInputError(f"{message}; see {self.prog} --help")
