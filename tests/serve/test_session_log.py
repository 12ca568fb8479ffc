"""A machine that reads the server's log finds stream, chunk, epoch and rank without parsing."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from scope_runners.serve.json_lines import JsonFormatter, set_up_server_log
from scope_runners.serve.session_log import log_event
from tests.serve.viewed import view

EVENTS: list[dict[str, Any]] = [
    {"type": "state", "session": view()},
    {"type": "rank", "rank": 1, "state": "lost", "detail": "rank 1 was ended by SIGKILL"},
    {
        "type": "chunk",
        "chunk_index": 41,
        "cache_epoch": 2,
        "prompt": "a secret prompt",
        "num_frames": 12,
    },
    {
        "type": "receipt",
        "receipt": {
            "id": "c1",
            "kind": "prompt",
            "state": "pending",
            "chunk_index": -1,
            "cache_epoch": -1,
            "fields": {"text": "a secret prompt"},
        },
    },
    {"type": "retracted", "first_chunk": 38, "last_chunk": 40, "reason": "rank 1: wrong sums"},
    {"type": "recording", "name": "take1", "state": "started", "num_frames": 0},
    {"type": "stats", "stats": {}},
]


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SCOPE_LOG_LEVEL", "INFO")
    loggers = [logging.getLogger(name) for name in ("scope_rt", "scope_runners")]
    before = [(logger.level, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    root = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers = root
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.level, logger.handlers, logger.propagate = level, handlers, propagate


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    set_up_server_log("json")
    for event in EVENTS:
        log_event("4f0c", event)
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_every_line_is_one_object_with_its_stream(capsys: pytest.CaptureFixture[str]) -> None:
    lines = logged(capsys)
    assert len(lines) == len(EVENTS) - 1, "figures of every second are not logged"
    assert {line["stream"] for line in lines} == {"4f0c"}
    assert {line["source"] for line in lines} == {"server"}


def test_chunk_epoch_and_rank_are_fields_where_they_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state, rank, chunk, receipt, retracted, _ = logged(capsys)
    assert (state["chunk"], state["epoch"]) == (40, 2)
    assert rank["rank"] == 1
    assert (chunk["chunk"], chunk["epoch"]) == (41, 2)
    assert "chunk" not in receipt, "the command is not applied yet"
    assert retracted["chunk"] == 38


def test_a_loss_is_a_warning_and_a_retraction_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    levels = [line["level"] for line in logged(capsys)]
    assert levels == ["INFO", "WARNING", "INFO", "INFO", "ERROR", "INFO"]


def test_no_line_holds_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert "secret" not in json.dumps(logged(capsys))


def test_a_line_moves_no_cursor_and_has_only_what_is_known() -> None:
    record = logging.LogRecord("x", logging.ERROR, "", 0, "two\nlines \x1b[2J", None, None)
    record.created = 0.25
    assert json.loads(JsonFormatter(source="server").format(record)) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "ERROR",
        "source": "server",
        "message": "two lines ?[2J",
    }


def test_what_a_library_says_of_itself_is_one_object_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up_server_log("json")
    logging.getLogger("uvicorn.error").warning("cannot\nread")
    assert json.loads(capsys.readouterr().err)["message"] == "cannot read"


def test_text_is_the_form_of_all_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_server_log("text")
    log_event("4f0c", EVENTS[1])
    line = capsys.readouterr().err
    assert line.endswith(" WARNING server stream=-: session 4f0c: rank 1 was ended by SIGKILL\n")
