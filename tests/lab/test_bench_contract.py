import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from scope_lab import bench_contract
from scope_lab.bench_contract import ContractBenchmark, Cost, Slowdown, table
from scope_lab.contract_parts import Kind, Moment, contract_parts
from scope_lab.main import main as lab
from scope_rt import disk
from scope_rt.config import StreamConfig
from scope_rt.record import stream_log
from scope_rt.record.log_disk import write_at
from tests.tiny_folder import write_tiny_folder

COST = Cost(
    name="preflight",
    kind=Kind.BUDGETED,
    where=Moment.RUN,
    microseconds=90,
    lower=80,
    upper=100,
    share=0.009,
)
FOUND = ContractBenchmark(
    cores=2,
    threads=1,
    digest_every=64,
    rounds=2,
    chunks=3,
    chunk_ms=10.0,
    costs=(COST, replace(COST, name="snapshot", share=0.5, kind=Kind.ON_REQUEST)),
    share=0.009,
    share_queued=0.008,
    share_always=0.02,
    whole=Slowdown(median=0.005, lowest=-0.01, highest=0.02),
    noise=Slowdown(median=0.001, lowest=-0.012, highest=0.004),
)
DEAR = replace(FOUND, share=0.0101)


@pytest.fixture(scope="module")
def measured() -> ContractBenchmark:
    return bench_contract.measure(rounds=1, num_chunks=3, threads=1)


def test_the_shares_are_the_sums_of_their_parts(measured: ContractBenchmark) -> None:
    share = {kind: sum(cost.share for cost in measured.costs if cost.kind is kind) for kind in Kind}
    assert all(share.values())
    assert measured.share_queued == pytest.approx(share[Kind.BUDGETED])
    assert measured.share == pytest.approx(share[Kind.BUDGETED] + share[Kind.WRITTEN])
    assert measured.share_always == pytest.approx(measured.share + share[Kind.ALWAYS])


def test_parity_digests_budget_and_log_are_all_measured(measured: ContractBenchmark) -> None:
    budgeted = {cost.name for cost in measured.costs if cost.kind is Kind.BUDGETED}
    for word in ("comparison", "state digest", "SHA-256", "call budget", "stream log"):
        assert any(word in name for name in budgeted), word
    paid = [cost for cost in measured.costs if cost.kind in (Kind.BUDGETED, Kind.ALWAYS)]
    assert all(cost.microseconds > 0 for cost in paid)
    assert all(cost.lower <= cost.microseconds <= cost.upper for cost in measured.costs)


def test_a_chunk_takes_longer_than_its_contract(measured: ContractBenchmark) -> None:
    assert 0 < measured.share < measured.share_always < 1
    assert measured.chunk_ms > 0


def test_every_part_leaves_what_the_next_call_of_it_needs(tmp_path: Path) -> None:
    config = StreamConfig.of(write_tiny_folder(tmp_path / "model"))
    with contract_parts(config, folder=tmp_path) as parts:
        for part in parts * 3:
            part.work()
            if part.without is not None:
                part.without()


def test_a_record_costs_what_it_takes_until_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(file: int, start: int, data: bytes) -> None:
        time.sleep(0.05)
        write_at(file, start, data)

    config = StreamConfig.of(write_tiny_folder(tmp_path / "model"))
    monkeypatch.setattr(disk, "_IDLE_S", 60.0)  # else what is queued is written after a second
    with contract_parts(config, folder=tmp_path) as parts:
        monkeypatch.setattr(stream_log, "write_at", slowly)
        logged = [part for part in parts if part.name.startswith("stream log")]
        assert [part.kind for part in logged] == [Kind.BUDGETED, Kind.BUDGETED, Kind.WRITTEN]
        num_bytes = (tmp_path / "parts.scope").stat().st_size
        sizes = []
        for part in logged:
            part.work()
            assert part.clock is time.process_time
            sizes.append((tmp_path / "parts.scope").stat().st_size)
        assert sizes[:2] == [num_bytes] * 2, "nothing is written that was counted as queued only"
        written = (tmp_path / "parts.scope").read_bytes()[num_bytes:]
        assert [b"planned" in written, b"finished" in written] == [True, True]


def test_the_difference_of_the_whole_must_exceed_that_of_equal_streams() -> None:
    assert not FOUND.is_above_noise
    assert replace(FOUND, whole=replace(FOUND.whole, median=0.02)).is_above_noise
    assert "within what two equal streams" in table(FOUND)


@pytest.mark.parametrize(("result", "code"), [(FOUND, 0), (DEAR, 1)])
def test_a_contract_over_its_budget_fails(
    result: ContractBenchmark,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench_contract, "measure", lambda **_: result)
    assert lab(["bench_contract", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["holds"] is (code == 0)
    assert lab(["bench_contract"]) == code
    assert ("EXCEEDED" in capsys.readouterr().out) is (code == 1)
