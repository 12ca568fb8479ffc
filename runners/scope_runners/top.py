"""`scope-rt top`: the sessions of a server, one line each, as its own API tells them.

Needs the standard library only, on the machine of the person who looks.
"""

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from scope_contracts.errors import ScopeError, UserInputError
from scope_rt.environment_names import SERVE_TOKEN
from scope_runners.arguments import positive_number
from scope_runners.wording import printable

DEFAULT_URL = "http://127.0.0.1:8000"
_ANSWER_S = 5.0
_MOST_BYTES = 2**24
_CLEAR = "\x1b[H\x1b[2J"
_DASH = "-"


class ServerAnswerError(ScopeError):
    """A server does not answer, or is no server of ours."""


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt top`."""
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    parser.add_argument("--once", action="store_true", help="print one table and leave")
    parser.add_argument(
        "--every", type=positive_number, default=1.0, metavar="S", help="seconds; default 1"
    )
    parser.add_argument(
        "--token", default="", help=f"what the server was started with; or {SERVE_TOKEN}"
    )


def run_top(namespace: argparse.Namespace) -> int:
    """Print tables until a person interrupts; one, where nobody could see it change.

    Raises:
        UserInputError: the URL cannot be used.
        ServerAnswerError: the server does not answer; once it has, it is waited for.
    """
    if not _is_of_a_server(namespace.url):
        raise UserInputError(f"{namespace.url!r} is no URL of a server; give one as {DEFAULT_URL}")
    token = namespace.token or os.environ.get(SERVE_TOKEN, "")
    if namespace.once or not sys.stdout.isatty():
        print("\n".join(table(sessions_of(namespace.url, token))))
        return 0
    said = table(sessions_of(namespace.url, token))
    while True:
        at = time.strftime("%H:%M:%S")
        print(_CLEAR + "\n".join((f"{namespace.url}   {at}   Ctrl-C ends", "", *_cut(said))))
        time.sleep(namespace.every)
        try:
            said = table(sessions_of(namespace.url, token))
        except ServerAnswerError as error:
            said = [str(error)]


def _is_of_a_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an end, a port that is no number
        return False


def sessions_of(url: str, token: str) -> list[Mapping[str, Any]]:
    """The views of all sessions; blocks 5 s at most for each part of the answer.

    Raises:
        ServerAnswerError: the server does not answer as ours do.
    """
    request = urllib.request.Request(url.rstrip("/") + "/v1/sessions")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            views = json.loads(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        hint = "give its --token" if error.code in (401, 403) else "is it a server of scope-rt?"
        raise ServerAnswerError(f"{url} answers {error.code}; {hint}") from error
    except (OSError, ValueError, HTTPException) as error:
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ServerAnswerError(f"{url} does not answer ({why}); is scope-rt serve up?") from error
    if not isinstance(views, list) or not all(_is_view(each) for each in views):
        raise ServerAnswerError(f"{url} does not list sessions; is it a server of scope-rt?")
    return views


def _is_view(each: Any) -> bool:
    return isinstance(each, dict) and {"id", "state", "stats", "ranks"} <= each.keys()


@dataclass(frozen=True, slots=True)
class _Column:
    head: str
    is_text: bool = False


_COLUMNS = (
    _Column("session", is_text=True),
    _Column("state", is_text=True),
    _Column("plan", is_text=True),
    _Column("ranks", is_text=True),
    _Column("chunk"),
    _Column("epoch"),
    _Column("frames/s"),
    _Column("of"),
    _Column("lead s"),
    _Column("latency p50/p95 ms"),
    _Column("generate p95 ms"),
    _Column("cache"),
    _Column("viewers"),
    _Column("drops"),
    _Column("stalls"),
    _Column("restarts"),
    _Column("parity", is_text=True),
)


def table(views: Sequence[Mapping[str, Any]]) -> list[str]:
    """Head and one line a session, then a line for each session that has something to say."""
    if not views:
        return ["no sessions"]
    rows = [tuple(column.head for column in _COLUMNS), *(_cells(view) for view in views)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_COLUMNS))]
    lines = []
    for row in rows:
        padded = (
            cell.ljust(width) if column.is_text else cell.rjust(width)
            for cell, width, column in zip(row, widths, _COLUMNS, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    ill = (view for view in views if view["state"] not in ("live", "paused"))
    return lines + [printable(f"{view['id']}: {view['detail']}") for view in ill]


def _cells(view: Mapping[str, Any]) -> tuple[str, ...]:
    stats, ranks = view["stats"], view["ranks"]
    running = sum(each["state"] == "running" for each in ranks)
    latency = stats["prompt_latency_ms"]
    fill = f"{stats['cache_fill']:.0%} of {stats['cache_bytes'] / 2**20:.0f} MiB"
    cells = (
        view["id"],
        view["state"],
        view["plan"] or _DASH,
        f"{running}/{view['world_size']}" if view["world_size"] else _DASH,
        view["chunk_index"] if view["chunk_index"] >= 0 else _DASH,
        view["cache_epoch"] if view["cache_epoch"] >= 0 else _DASH,
        _figure(stats["frames_per_s"], 1),
        _figure(view["fps"], 0),
        _figure(view["lead_s"], 2),
        f"{_figure(latency['p50'], 0)}/{_figure(latency['p95'], 0)}",
        _figure(stats["stage_ms"].get("generate", {}).get("p95"), 0),
        fill,
        view["viewers"],
        sum(stats["drops"].values()),
        stats["stalls"],
        stats["recoveries"],
        stats["parity"],
    )
    return tuple(printable(str(cell)) for cell in cells)


def _figure(value: float | None, num_digits: int) -> str:
    return _DASH if value is None else f"{value:.{num_digits}f}"


def _cut(lines: Sequence[str]) -> list[str]:
    """As many characters as the terminal has, so that no line wraps."""
    try:
        width = os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        return list(lines)
    return [line[:width] for line in lines]
