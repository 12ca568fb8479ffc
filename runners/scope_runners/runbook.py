"""`scope-rt runbook`: what an error that says `see runbooks/hang.md` means, wherever we run.

The pages stand in `runbooks/` of the repository and are carried by the wheel.
"""

import argparse
from pathlib import Path

from scope_contracts.errors import UserInputError

FOLDER = Path(__file__).parent / "runbooks"
"""In the repository a link to its `runbooks`."""


def add_runbook_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt runbook`."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="such as hang; without one, all are listed"
    )


def run_runbook(namespace: argparse.Namespace) -> int:
    """Print one page, or the names of all; returns the exit code.

    Raises:
        UserInputError: there is no page of that name.
    """
    files = sorted(FOLDER.rglob("*.md"))
    pages = {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in files}
    if namespace.name is None:
        for name, page in pages.items():
            print(f"{name:<20} {_title(page)}")
        return 0
    name = namespace.name.removeprefix("runbooks/").removesuffix(".md")
    if name not in pages:
        known = ", ".join(pages)
        raise UserInputError(f"no runbook is called {namespace.name!r}; there are {known}")
    print(pages[name].read_text(encoding="utf-8").rstrip())
    return 0


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
