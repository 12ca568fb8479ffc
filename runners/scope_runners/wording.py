"""Numbers and foreign text in sentences that a person reads."""

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


def printable(text: str, *, most: int = 300) -> str:
    """`text` without what would move a terminal's cursor, and not without end."""
    clipped = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(character if character.isprintable() else "?" for character in clipped)
