"""Two hosts must name the loss that there was, and are not made for what cannot be run."""

from dataclasses import replace
from pathlib import Path

import pytest

from scope_contracts.envelope import PlanId
from scope_lab.main import main as lab
from scope_lab.two_hosts import Fault, misnamed
from scope_lab.two_hosts_report import HostReport
from scope_rt.topology import Topology

PP1_TP2 = Topology(plan_id=PlanId.PP1, tp_degree=2)
FAR_SILENT = "rank 0: receive from rank 1: ranks 1, 2 sent no heartbeat for 4.2 s"
STORE_SILENT = "rank 2: the store at 192.0.2.1:48817, hosted by rank 0, did not answer for 4.0 s"
LEADER_GONE = "rank 2: sum over ranks 1, 2: rank 1 closed the connection"
FOLLOWER_GONE = "rank 0: receive from rank 1: rank 2 closed the connection"
CONTROL_GONE = "rank 1: receive from rank 0: rank 0 closed the connection"


def host(letter: str, said: str) -> HostReport:
    return HostReport(host=letter, said=f"{said}; see runbooks/hang.md", named_s=0.1, code=0)


@pytest.mark.parametrize(
    ("fault", "letter", "right", "wrong"),
    [
        (Fault.CABLE, "a", [FAR_SILENT], [STORE_SILENT, LEADER_GONE]),
        (Fault.CABLE, "b", [STORE_SILENT, LEADER_GONE], [FAR_SILENT, CONTROL_GONE]),
        (Fault.RANK, "a", [LEADER_GONE], [FOLLOWER_GONE, CONTROL_GONE, FAR_SILENT]),
        (Fault.RANK, "b", [LEADER_GONE], [FOLLOWER_GONE, CONTROL_GONE, STORE_SILENT]),
        (Fault.HOST, "a", [LEADER_GONE, FOLLOWER_GONE], [CONTROL_GONE, FAR_SILENT]),
    ],
)
def test_a_host_that_names_another_culprit_is_a_complaint(
    fault: Fault, letter: str, right: list[str], wrong: list[str]
) -> None:
    for said in right:
        assert list(misnamed([host(letter, said)], fault=fault, topology=PP1_TP2)) == []
    for said in wrong:
        (complaint,) = misnamed([host(letter, said)], fault=fault, topology=PP1_TP2)
        assert complaint.startswith(f"host {letter} says '{said}; see runbooks/hang.md', want ")


def test_a_host_that_could_say_nothing_has_not_named_another_culprit() -> None:
    dead = replace(host("b", ""), said="", named_s=None)
    assert list(misnamed([dead], fault=Fault.HOST, topology=PP1_TP2)) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--lasts", "-1"], "--lasts: '-1' is not a number above 0"),
        (["--lasts", "nan"], "--lasts: 'nan' is not a number above 0"),
        (["--seconds", "inf"], "--seconds: 'inf' is not a number above 0"),
        (["--seconds", "0"], "--seconds: '0' is not a number above 0"),
        (["--plan", "tp_v1_1"], "--plan: 'tp_v1_1' is not one of pp0, pp1"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    folder = tmp_path / "hosts"
    assert lab(["two_hosts", "--out", str(folder), *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not folder.exists()


def test_a_folder_inside_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert lab(["two_hosts", "--out", str(tmp_path / "notes.txt" / "hosts")]) == 2
    assert "(Not a directory); choose another --out" in capsys.readouterr().err
