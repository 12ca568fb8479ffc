"""Numbers and foreign text in sentences that a person reads."""


def counted(number: int, thing: str) -> str:
    """`1 chunk`, `2 chunks`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def printable(text: str, *, most: int = 300) -> str:
    """`text` without what would move a terminal's cursor, and not without end."""
    clipped = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(character if character.isprintable() else "?" for character in clipped)
