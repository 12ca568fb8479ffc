"""Hostile bytes end in a value or a named error, and a fuzzer that finds more tells."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scope_contracts import (
    ContractError,
    ParityKeys,
    PreflightError,
    ScalarDigest,
    WireError,
    decode_envelope,
    decode_result,
    preflight,
)
from scope_contracts.log_file import Entry, LogReader, end_of_whole
from scope_contracts.log_records import decode_record
from scope_lab.fuzz import judge, run, seeds
from scope_lab.fuzz.judge import Figures, Judge
from scope_lab.fuzz.loose_msgpack import parse, write
from scope_lab.fuzz.targets import ACCEPTED, MOST_LETTERS, TARGETS, Target
from scope_lab.main import main as lab

SUITE_COUNT = 1_200
EVERY_TARGET = pytest.mark.parametrize("name", TARGETS)
MUST_MEET = {
    "envelope": {ACCEPTED, "WireError", "FieldError", "VersionError", "PreflightError"},
    "result": {ACCEPTED, "WireError", "FieldError", "VersionError"},
    "recording": {ACCEPTED, "WireError", "FieldError"},
    "parity": {ACCEPTED, "WireError", "FieldError"},
}


def share(folder: Path, *, count: int, first: int = 0) -> run.Share:
    return run.Share(seed=3, first=first, count=count, seconds=0, folder=folder)


@EVERY_TARGET
def test_mutated_inputs_end_in_a_value_or_a_named_error(name: str, tmp_path: Path) -> None:
    *_, figures = run.random_engine(TARGETS[name], share(tmp_path, count=SUITE_COUNT))
    assert figures.executions == SUITE_COUNT == sum(figures.verdicts.values())
    assert set(figures.verdicts) >= MUST_MEET[name]
    assert 0 < figures.peak_bytes <= judge.MOST_PEAK_BYTES
    assert list(tmp_path.iterdir()) == []


@EVERY_TARGET
@given(data=st.binary(max_size=300))
def test_any_bytes_end_in_a_value_or_a_named_error(name: str, data: bytes) -> None:
    TARGETS[name].verdict(data)


@EVERY_TARGET
def test_every_seed_is_legal_and_every_cut_of_it_is_judged(name: str) -> None:
    for seed in TARGETS[name].seeds:
        assert TARGETS[name].verdict(seed) == ACCEPTED
        cuts = range(0, len(seed), 1 + len(seed) // 300)
        verdicts = {TARGETS[name].verdict(seed[:end]) for end in cuts}
        assert verdicts <= {ACCEPTED, "WireError"}


@EVERY_TARGET
def test_an_input_is_a_function_of_seed_and_index(name: str) -> None:
    target = TARGETS[name]
    assert [target.input(3, i) for i in range(50)] == [target.input(3, i) for i in range(50)]
    assert len({target.input(seed, i) for seed in (3, 4) for i in range(50)}) > 90


CLAIMS = [
    opening * depth
    for depth in (1, 40, 1_000, 1_020)
    for opening in (
        *(b"\xdc\xff\xff", b"\xdc\x20\x00", b"\xdd\x00\x00\xff\xff"),
        *(b"\xde\x7f\xff\xa1a", b"\xdf\x00\x00\x7f\xff\xa1a"),
    )
]
DECODERS: dict[str, Callable[[bytes], object]] = {
    "decode_envelope": decode_envelope,
    "decode_result": decode_result,
    "decode_record": decode_record,
    "ParityKeys.decode": ParityKeys.decode,
    "ScalarDigest.decode": ScalarDigest.decode,
}


@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
def test_lengths_without_items_take_no_memory(decode: Callable[[bytes], object]) -> None:
    for claims in CLAIMS:
        hostile = (b"\x81\xa1a" + claims).ljust(60_000, b"\xc0")
        tracemalloc.start()
        with pytest.raises(WireError):
            decode(hostile)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 8 * 2**20, claims[:5]


def test_a_hostile_peer_cannot_fill_the_log_with_shapes() -> None:
    specs = tuple(replace(spec, shape=(2**63 - 1,) * 256) for spec in seeds.ENVELOPES[3].tensors)
    envelope = replace(seeds.ENVELOPES[3], tensors=(*specs, specs[0]))
    with pytest.raises(PreflightError) as caught:
        preflight(envelope, {spec.name: spec for spec in specs}, seeds.GEOMETRY)
    assert len(str(caught.value)) <= MOST_LETTERS


def whole_records(data: bytes) -> tuple[list[Entry], bool]:
    """The records up to the first damage, and whether there is none."""
    entries: list[Entry] = []
    try:
        for entry in LogReader(BytesIO(data)):
            entries.append(entry)
    except ContractError:
        return entries, False
    return entries, True


def test_what_a_resume_keeps_is_every_whole_record_or_the_file_is_refused() -> None:
    outcomes = set()
    for index in range(300):
        before = TARGETS["recording"].input(5, index)
        try:
            kept = before[: end_of_whole(BytesIO(before))]
        except ContractError:
            outcomes.add("refused")
            continue
        assert whole_records(kept) == whole_records(before)
        outcomes.add("cut" if len(kept) < len(before) else "kept")
    assert outcomes == {"refused", "cut", "kept"}


def broken(read: Callable[[bytes], None]) -> Target:
    target = TARGETS["parity"]
    return replace(target, read=read)


def test_an_input_that_breaks_something_is_kept_and_run_first_until_it_does_not(
    tmp_path: Path,
) -> None:
    def read(data: bytes) -> None:
        assert len(data) > 100, "a bug"

    with pytest.raises(AssertionError, match="a bug"):
        list(run.random_engine(broken(read), share(tmp_path, count=500)))
    kept = tmp_path / "parity.input"
    culprit = kept.read_bytes()
    assert len(culprit) <= 100

    seen: list[bytes] = []
    *_, figures = run.random_engine(broken(seen.append), share(tmp_path, count=20))
    assert seen[0] == culprit
    assert figures.executions == 20
    assert not kept.exists()


def test_an_error_of_another_kind_is_no_refusal(tmp_path: Path) -> None:
    def read(data: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(run.random_engine(broken(read), share(tmp_path, count=1)))


def test_long_errors_much_memory_and_slow_inputs_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talks(data: bytes) -> None:
        raise WireError("x" * (MOST_LETTERS + 1))

    def hoards(data: bytes) -> None:
        bytearray(judge.MOST_PEAK_BYTES + 1)

    def does_nothing(data: bytes) -> None: ...

    def judged(read: Callable[[bytes], None], **options: Any) -> None:
        with Judge(broken(read), tmp_path / "input", **options) as one:
            one.judge(b"")

    judged(does_nothing)
    for read, words in ((talks, "letters"), (hoards, "bytes for")):
        with pytest.raises(AssertionError, match=words):
            judged(read)
    with pytest.raises(AssertionError, match="has grown"):
        judged(does_nothing, most_growth_bytes=-1)
    monkeypatch.setattr(judge, "MOST_SECONDS", -1)
    with pytest.raises(AssertionError, match="s of work"):
        judged(does_nothing)


@pytest.mark.parametrize("data", [*seeds.MESSAGES, *seeds.ANSWERS])
def test_the_loose_writer_writes_what_was_parsed_and_longer_where_asked(data: bytes) -> None:
    tree, rng = parse(data), Random(1)
    assert write(tree, rng) == data
    longer = write(tree, rng, longer=1.0)
    assert len(longer) > len(data)
    assert _nearly(msgpack.unpackb(longer), msgpack.unpackb(data))


def _nearly(left: Any, right: Any) -> bool:
    """Equal but for floats that took half their width."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_nearly(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_nearly, left, right))
    return bool(left == pytest.approx(right)) if isinstance(left, float) else left == right


def test_the_command_reports_each_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab(["fuzz", "--count", "41", "--out", str(tmp_path), "--json"]) == 0
    told = [Figures.from_json(line) for line in capsys.readouterr().out.splitlines()]
    assert [figures.target for figures in told] == list(TARGETS)
    assert sum(figures.executions for figures in told) == 41


def test_the_command_runs_one_input_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "input"
    file.write_bytes(b"")
    assert lab(["fuzz", "--target", "envelope", "--input", str(file)]) == 0
    assert capsys.readouterr().out == "envelope: WireError\n"
    assert lab(["fuzz", "--input", str(file)]) == 2
    assert lab(["fuzz", "--target", "envelope", "--input", str(tmp_path / "none")]) == 2
    assert lab(["fuzz", "--minutes", "-1"]) == 2


def test_without_atheris_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert lab(["fuzz", "--engine", "atheris"]) == 2
    assert "pip install 'scope-rt[fuzz]'" in capsys.readouterr().err


def test_atheris_counts_as_the_random_engine_does(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    *_, figures = run.atheris_engine(TARGETS["parity"], share(tmp_path, count=300))
    assert figures.executions == 300
    assert figures.accepted > 0
