"""Requests that a server's own schema allows, or nearly allows; not a test itself."""

from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from tests.serve.idle_server import IdleServer
from tests.serve.running_server import RunningServer

ORDERLY_REFUSALS = (503,)
"""Of those from 500 on: the server has as many sessions or viewers as it may."""
STREAMS = ("/stream.mjpeg",)
"""Ends of paths whose answers have no end."""


def answers(
    server: IdleServer | RunningServer,
    *,
    session_id: str,
    num_examples: int,
    without: tuple[tuple[str, str], ...] = (),
) -> Counter[tuple[str, str, int]]:
    """How often each operation was answered how: method, path and status.

    Half of the requests are about the session `session_id`; operations `without` are left out.
    """
    counts: Counter[tuple[str, str, int]] = Counter()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        name = (operation.method.upper(), operation.path)
        if name in without or operation.path.endswith(STREAMS):
            continue
        for mode in _modes(operation):
            _try(operation, mode, session_id, num_examples, counts)
    return counts


def _modes(operation: Any) -> list[GenerationMode]:
    """Any text is a part of a path: only a body or a query can be wrong."""
    can_be_wrong = bool(list(operation.body) or list(operation.query))
    return [mode for mode in GenerationMode if can_be_wrong or mode is GenerationMode.POSITIVE]


def _try(
    operation: Any,
    mode: GenerationMode,
    session_id: str,
    num_examples: int,
    counts: Counter[tuple[str, str, int]],
) -> None:
    tried = 0

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        nonlocal tried
        tried += 1
        if tried % 2 and "session_id" in case.path_parameters:
            case.path_parameters["session_id"] = session_id
        if isinstance(case.query.get("wait_s"), int | float) and 0 <= case.query["wait_s"] <= 60:
            case.query["wait_s"] = 0
        answer = case.call(timeout=30)
        counts[operation.method.upper(), operation.path, answer.status_code] += 1
        assert answer.status_code < 500 or answer.status_code in ORDERLY_REFUSALS, answer.text

    ask()
