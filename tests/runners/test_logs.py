"""A run says what happens to it in lines that an operator can sort and search."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scope_contracts.errors import PeerLostError, PeerRefusedError, UserInputError
from scope_runners import logs
from scope_runners.guarded import guarded
from scope_runners.rank_process import guarded_rank

LOG = logging.getLogger("scope_runners.launcher")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("scope_rt", "scope_runners")]
    before = [(logger.level, logger.handlers, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    yield
    for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
        logger.level, logger.handlers, logger.propagate = level, handlers, propagate


def test_a_line_has_time_level_source_stream_and_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.set_up(source="rank2", stream="video.mp4", environ={})
    LOG.warning("rank %d ended by %s", 1, "SIGKILL")
    line = capsys.readouterr().err
    head = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ WARNING rank2 stream=video\.mp4: "
    assert re.fullmatch(head + "rank 1 ended by SIGKILL\n", line)


def test_what_a_later_call_does_not_say_stays(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(source="rank2", environ={})
    logs.set_up(stream="video.mp4", environ={})
    LOG.warning("lost")
    logs.set_up(source="launcher", environ={})
    LOG.warning("lost")
    sources = [line.split(" ", 2)[2] for line in capsys.readouterr().err.splitlines()]
    assert sources == [
        "rank2 stream=video.mp4: lost",
        "launcher stream=video.mp4: lost",
    ]


def test_the_time_is_utc(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("scope_rt", logging.INFO, "", 0, "said", None, None)
    record.created = 0.0
    line = logs.LineFormatter(source="rank0", stream="-").format(record)
    assert line == "1970-01-01T00:00:00Z INFO rank0 stream=-: said"


def test_an_event_is_one_line_and_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up(source="rank0", environ={})
    LOG.error("two\nlines \x1b[2J")
    assert capsys.readouterr().err.endswith("ERROR rank0 stream=-: two lines ?[2J\n")


@pytest.mark.parametrize(
    ("level", "said"), [("INFO", ["INFO", "WARNING"]), (None, ["WARNING"]), ("ERROR", [])]
)
def test_the_level_is_the_variables(
    level: str | None, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up(source="rank0", environ={} if level is None else {"SCOPE_LOG_LEVEL": level})
    LOG.info("started")
    LOG.warning("lost")
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == said


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(UserInputError, match="SCOPE_LOG_LEVEL is 'loud'; choose one of DEBUG, INF"):
        logs.set_up(source="rank0", environ={"SCOPE_LOG_LEVEL": "loud"})


def test_what_a_peer_refused_is_said_by_that_peer_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lose() -> int:
        raise PeerRefusedError("exchange between all ranks: rank 0 failed with UserInputError")

    logs.set_up(source="rank1", stream="video.mp4", environ={})
    assert guarded(lose, log=LOG) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("local_rank", "num_lines"), [(0, 1), (1, 0)])
def test_one_rank_of_another_host_says_who_refused_and_where_to_look(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    local_rank: int,
    num_lines: int,
) -> None:
    def lose() -> int:
        raise PeerRefusedError("rank 0 failed with UserInputError")

    monkeypatch.setattr(Path, "write_text", lambda *_: 0)  # else this process takes its name
    for name, value in {"RANK": 2 + local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    assert guarded_rank(lose) == 2
    lines = capsys.readouterr().err.splitlines()
    said = "rank 0 failed with UserInputError; it says what to change, on its own host"
    assert [line.endswith(said) for line in lines] == [True] * num_lines


def test_a_mesh_ranks_error_is_logged_with_its_name_and_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def lose() -> int:
        raise PeerLostError("receive from rank 1: rank 2 closed the connection")

    logs.set_up(source="rank1", stream="video.mp4", environ={})
    assert guarded(lose, log=LOG) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert " ERROR rank1 stream=video.mp4: PeerLostError: receive from rank 1: " in line
    assert line.endswith("; see runbooks/rank-loss.md")
