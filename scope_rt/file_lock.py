"""A file has one living writer: its lock ends with the process that holds it, however that ends."""

import fcntl
import os
from pathlib import Path


def open_locked(path: Path, *, must_exist: bool = False) -> int:
    """Open `path` to read and write, and lock it until it is closed; missing files are created.

    Waits for nobody. Raises `BlockingIOError` where another process holds it, any other `OSError`
    where it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (0 if must_exist else os.O_CREAT)
    while True:
        file = os.open(path, flags, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(file).st_ino:
                return file
        except FileNotFoundError:
            pass  # its last owner removed it between our two lines
        except OSError:
            os.close(file)
            raise
        os.close(file)
