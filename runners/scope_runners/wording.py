"""Numbers and foreign text in sentences that a person reads."""

from collections.abc import Iterable
from difflib import get_close_matches

from scope_contracts.retraction import Retraction


def retracted_chunks(retraction: Retraction) -> str:
    """Which chunks a retraction names."""
    first, last = retraction.first_chunk, retraction.last_chunk
    chunks = f"chunk {first}" if first == last else f"chunks {first} to {last}"
    first, last = retraction.first_epoch, retraction.last_epoch
    return (
        f"{chunks} of epoch {first}" if first == last else f"{chunks} of epochs {first} to {last}"
    )


def counted(number: int, thing: str) -> str:
    """`1 chunk`, `2 chunks`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def nearest(word: str, known: Iterable[str]) -> str:
    """What a sentence about an unknown `word` adds, where one of those that are known is near."""
    near = get_close_matches(word, list(known), n=1)
    return f", the nearest is {near[0]}" if near else ""


def printable(text: str, *, most: int = 300) -> str:
    """`text` without what would move a terminal's cursor, and not without end."""
    clipped = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(character if character.isprintable() else "?" for character in clipped)
