"""One bit of a file is another; not a test itself."""

from pathlib import Path


def flip(path: Path, position: int) -> None:
    """Change the byte there; positions below 0 count from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
