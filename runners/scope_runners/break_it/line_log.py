"""Files of JSON lines that several processes append to; a line outlives who wrote it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path | str, plain: Mapping[str, Any]) -> None:
    """Append one line by one write, so that what was written before a kill is kept."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, (json.dumps(plain) + "\n").encode())
    finally:
        os.close(file)
