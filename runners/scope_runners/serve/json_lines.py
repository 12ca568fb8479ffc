"""A log line is one JSON object, so that a machine need not parse a sentence.

    {"time": "2026-11-23T01:02:03.456Z", "level": "WARNING", "source": "server", "stream": "4f0c",
     "rank": 1, "message": "session 4f0c: rank 1 was killed (SIGKILL)"}

`stream` is the session's id; `chunk`, `epoch` and `rank` are there where a line is about one.
"""

import json
import logging
import time
from typing import Any

from scope_runners import logs
from scope_runners.wording import printable

FORMATS = ("text", "json")
FIELDS = ("stream", "chunk", "epoch", "rank")
_MOST_CHARACTERS = 4000


class JsonFormatter(logging.Formatter):
    """Reads `FIELDS` from what a line was logged with (`extra=`), as far as they are there."""

    def __init__(self, *, source: str) -> None:
        super().__init__()
        self.source = source

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = " ".join(record.getMessage().splitlines())
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.created % 1 * 1000):03d}Z",
            "level": record.levelname,
            "source": self.source,
        }
        line |= {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}
        line["message"] = printable(message, most=_MOST_CHARACTERS)
        if record.exc_info is not None and record.exc_info[1] is not None:
            line["error"] = type(record.exc_info[1]).__name__
        return json.dumps(line, ensure_ascii=False)


def set_up_server_log(log_format: str) -> None:
    """Let this process log as the server, in one of `FORMATS`.

    Raises:
        UserInputError: `SCOPE_LOG_LEVEL` is no level.
    """
    logs.set_up(source="server")
    if log_format == "json":
        logs.format_with(JsonFormatter(source="server"))
