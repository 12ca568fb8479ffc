"""What happens to a run while it runs is said on stderr, one line an event, in one format.

    2026-11-22T01:02:03Z WARNING launcher stream=video.mp4: rank 1 ended by SIGKILL; starting again

Time in UTC, level, who says it (`launcher`, or `rank` and its number), which stream, and what. Code
logs through `logging.getLogger(__name__)`. What a command prints as its result, and the sentence
with which it ends (`scope-rt: ...`), are for a person and have no such head.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from scope_contracts.errors import UserInputError
from scope_rt.environment_names import LOG_LEVEL
from scope_runners.wording import printable

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
DEFAULT_LEVEL = "WARNING"
_PACKAGES = ("scope_rt", "scope_runners")
_MOST_CHARACTERS = 4000


def set_up(
    *,
    source: str | None = None,
    stream: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Let this process log as `source` about `stream`; None keeps what an earlier call said.

    Raises:
        UserInputError: `SCOPE_LOG_LEVEL` is no level.
    """
    level = (os.environ if environ is None else environ).get(LOG_LEVEL, DEFAULT_LEVEL)
    if level not in LEVELS:
        raise UserInputError(f"{LOG_LEVEL} is {level!r}; choose one of {', '.join(LEVELS)}")
    before = _formatter()
    handler = _StderrHandler()
    handler.setFormatter(
        LineFormatter(source=source or before.source, stream=stream or before.stream)
    )
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(level)
        logger.handlers = [handler]
        logger.propagate = False


def format_with(formatter: logging.Formatter) -> None:
    """Write the lines of this process in another form, and those of libraries, from warnings on;
    `set_up` was called before."""
    handler = _StderrHandler()
    handler.setFormatter(formatter)
    for package in _PACKAGES:
        logging.getLogger(package).handlers = [handler]
    logging.getLogger().addHandler(handler)


def _formatter() -> "LineFormatter":
    for handler in logging.getLogger(_PACKAGES[0]).handlers:
        if isinstance(handler.formatter, LineFormatter):
            return handler.formatter
    return LineFormatter(source="rank0", stream="-")


class LineFormatter(logging.Formatter):
    """One line an event, whatever its message holds."""

    def __init__(self, *, source: str, stream: str) -> None:
        super().__init__()
        self.source, self.stream = source, printable(stream)

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        line = " ".join(record.getMessage().splitlines())
        what = printable(line, most=_MOST_CHARACTERS)
        return f"{at} {record.levelname} {self.source} stream={self.stream}: {what}"


class _StderrHandler(logging.Handler):
    """Writes to what is standard error at that moment; a log that nobody reads ends no stream."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)
