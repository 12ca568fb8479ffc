"""`scope-rt runbook`: what an error that says `see runbooks/hang.md` means, wherever we run.

The pages stand in `runbooks/` of the repository and are carried by the wheel.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from scope_contracts import errors
from scope_contracts.errors import UserInputError
from scope_runners.wording import nearest

FOLDER = Path(__file__).parent / "runbooks"
"""In the repository a link to its `runbooks`."""


def add_runbook_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt runbook`."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="such as hang, or an error such as PeerLostError; without one, all are listed",
    )


def run_runbook(namespace: argparse.Namespace) -> int:
    """Print one page, or the names of all; returns the exit code.

    Raises:
        UserInputError: there is no page of that name.
    """
    files = sorted(FOLDER.rglob("*.md"))
    pages = {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in files}
    if namespace.name is None:
        width = max(map(len, pages))
        for name, page in pages.items():
            print(f"{name:<{width}}  {_title(page)}")
        return 0
    name = namespace.name.removeprefix("runbooks/").removesuffix(".md")
    found = _page_of(name, pages)
    if found is None:
        known = [*pages, *(page.rpartition("/")[2] for page in pages)]
        raise UserInputError(
            f"no runbook is called {namespace.name!r}{nearest(name, known)}; there are "
            f"{', '.join(pages)}"
        )
    print(pages[found].read_text(encoding="utf-8").rstrip())
    return 0


def _page_of(name: str, pages: Mapping[str, Path]) -> str | None:
    """The page of that name, in whatever folder, or the one that answers the error of that name."""
    named = [page for page in pages if name in (page, page.rpartition("/")[2])]
    if named:
        return named[0]
    kind = vars(errors).get(name)
    if not isinstance(kind, type) or not issubclass(kind, errors.ScopeError):
        return None
    answering = [page for page, file in pages.items() if f"`{name}" in _answers(file)]
    return kind.runbook or next(iter(answering), None)


def _answers(page: Path) -> str:
    """The paragraph in which a page says which errors it answers; empty where none does."""
    return page.read_text(encoding="utf-8").partition("\n\nAnswers ")[2].partition("\n\n")[0]


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
