"""A stream over two hosts survives that the cable is cut, a rank is killed, or a host reboots.

Each host runs torchrun by itself, as on two real machines: rank0 on the first, the generator group
on the second. The loss must be named within its bound, the stream must resume by itself when all is
well again, and what was shown must equal a replay that recomputes at the same chunk.
"""

import argparse
import json
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any

from scope_contracts.envelope import PlanId
from scope_contracts.errors import ScopeError
from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Finished, Opened, Record
from scope_lab.fresh_folder import fresh_folder
from scope_lab.replay_process import replayed
from scope_lab.two_hosts_report import HostReport, TwoHostsReport, table
from scope_rt.environment_names import SECRET
from scope_rt.models.loading import EMBEDDED
from scope_rt.record.reader import StreamHistory, open_log, read_stream
from scope_rt.topology import PIPELINED, Topology
from scope_runners.arguments import one_of, positive, positive_number
from scope_runners.break_it.cases.ranks import FAR_IS_SILENT, STORE_IS_SILENT
from scope_runners.command_parser import CommandParser
from scope_runners.exit_codes import FAILED
from scope_runners.namespaces import INTERFACE, CabledHosts, torchrun

HEARTBEAT_S = 5.0
CUT_NAMED_S, KILL_NAMED_S = HEARTBEAT_S, 2.0
"""Within this after a cut, or a kill, the hosts have said what they lost."""
_ENVIRON = {
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "OMP_NUM_THREADS": "1",
    "SCOPE_HEARTBEAT_TIMEOUT_S": str(HEARTBEAT_S),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Else a torchrun that was started again waits for keys that the other one never writes.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_FAULT_CHUNK = 8
_MOST_S = 300.0
"""For anything that is waited for."""
_LOSS = "see runbooks/"
"""How the sentence of a named loss ends."""


class Fault(StrEnum):
    """What happens to the hosts."""

    CABLE = "cable"
    """It is cut for a while."""
    RANK = "rank"
    """The generator group's leader is killed."""
    HOST = "host"
    """All processes of the second host are killed, and its torchrun is started again later."""


class _Console(threading.Thread):
    """What a host prints, line by line, with the time of each."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        super().__init__(daemon=True)
        self._process, self._log = process, log
        self.lines: list[tuple[float, str]] = []
        self.start()

    def run(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("ab") as log:
            for line in self._process.stdout:
                self.lines.append((time.time(), line.decode(errors="replace").rstrip()))
                log.write(line)
                log.flush()

    def loss(self, after_s: float) -> tuple[float, str] | None:
        """The first named loss after a time: how long after it, and what was said."""
        losses = ((at_s, line) for at_s, line in self.lines if at_s >= after_s and _LOSS in line)
        return next(((at_s - after_s, line) for at_s, line in losses), None)


def misnamed(hosts: Sequence[HostReport], *, fault: Fault, topology: Topology) -> Iterator[str]:
    """Complaints about hosts that named another loss than the one there was."""
    for host in hosts:
        culprit = _culprit(fault, topology, is_first=host.host == "a")
        if host.named_s is not None and not re.search(culprit, host.said):
            yield f"host {host.host} says {host.said!r}, want {culprit!r}"


def _culprit(fault: Fault, topology: Topology, *, is_first: bool) -> str:
    """What a host must say: a regular expression."""
    match fault:
        case Fault.CABLE:
            return FAR_IS_SILENT if is_first else STORE_IS_SILENT
        case Fault.RANK:
            return rf"\branks? {topology.leader}(, \d+)* closed the connection"
        case Fault.HOST:  # whose processes may go in any order
            return r"\branks? [1-9][\d, ]* closed the connection"


class _Run:
    """One stream over two hosts, and what is known of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.topology = Topology(plan_id=args.plan, tp_degree=args.tp)
        self.fault: Fault = args.fault
        self.folder: Path = args.out.absolute()
        self.recording = self.folder / "stream.scope"
        self._lasts_s: float = args.lasts
        # Hosts count their restarts apart: rank0 resumes whatever stream is there.
        self._arguments = ["--resume", "--record", str(self.recording)]
        self._arguments += ["--out", str(self.folder / "stream.mp4"), "--json"]
        self._arguments += ["--plan", args.plan, "--tp", str(args.tp), "--model", args.model]
        self._arguments += ["--seconds", f"{args.seconds:f}"]
        self._arguments += ["--prompt", "a red circle, fast, on navy"]
        self._environ = {**_ENVIRON, SECRET: secrets.token_hex(32)}
        self.fault_s = self.restored_s = 0.0
        self.consoles: list[_Console] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.codes: list[int] = []

    def run(self) -> None:
        """Stream, break it, and wait for the end."""
        with CabledHosts() as cabled:
            self._processes = [self._start(cabled, letter) for letter in "ab"]
            _wait(lambda: self._num_finished() > _FAULT_CHUNK, self._processes, "chunks")
            self.fault_s = time.time()
            self._break(cabled)
            self.restored_s = time.time()
            _wait(lambda: all(p.poll() is not None for p in self._processes), (), "end")
        self.codes = [process.returncode for process in self._processes]
        for console in self.consoles:
            console.join(_MOST_S)

    def _break(self, cabled: CabledHosts) -> None:
        second = cabled.hosts[1]
        match self.fault:
            case Fault.CABLE:
                cabled.cut()
                time.sleep(self._lasts_s)
                cabled.restore()
            case Fault.RANK:
                leader = f"\0RANK={self.topology.leader}\0".encode()
                for pid in second.processes():
                    if leader in Path(f"/proc/{pid}/environ").read_bytes():
                        os.kill(pid, signal.SIGKILL)
            case Fault.HOST:
                for pid in second.processes():
                    os.kill(pid, signal.SIGKILL)
                time.sleep(self._lasts_s)
                self._processes[1].wait(_MOST_S)
                self._processes[1] = self._start(cabled, "b")

    def _start(self, cabled: CabledHosts, letter: str) -> subprocess.Popen[bytes]:
        first, _ = cabled.hosts
        host = cabled.hosts["ab".index(letter)]
        process = host.start(
            torchrun(
                host,
                store=first,
                num_ranks=1 if host == first else self.topology.tp_degree,
                program=("scope_runners.stream", *self._arguments),
            ),
            environ=self._environ,
            output=subprocess.PIPE,
        )
        self.consoles.append(_Console(process, self.folder / f"host-{letter}.log"))
        return process

    def _num_finished(self) -> int:
        if not self.recording.exists():
            return 0
        with open_log(self.recording) as file:
            return sum(isinstance(e.record, Finished) for e in LogReader(file))


def _wait(
    is_there: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]], what: str
) -> None:
    """Wait until it is there, while all `processes` run."""
    deadline_s = time.monotonic() + _MOST_S
    while not is_there():
        if time.monotonic() > deadline_s or any(p.poll() is not None for p in processes):
            raise ScopeError(f"two hosts: no {what} came; look at host-a.log and host-b.log")
        time.sleep(0.05)


def _judge(run: _Run) -> TwoHostsReport:
    with open_log(run.recording) as file:
        reader = LogReader(file)
        stream, _ = read_stream(reader)
        resumed_at_s = _first_chunk_after_restart_s([entry.record for entry in reader])
    hosts = []
    for letter, console, code in zip("ab", run.consoles, run.codes, strict=False):
        named_s, said = console.loss(run.fault_s) or (None, "")
        hosts.append(HostReport(host=letter, said=said, named_s=named_s, code=code))
    topology = run.topology
    again = replayed(
        run.recording,
        plan=topology.plan_id,
        tp=topology.tp_degree,
        log=run.folder / "replay.log",
        timeout_s=_MOST_S,
    )
    complaints = tuple(_complaints(run, hosts, stream, again))
    return TwoHostsReport(
        passed=not complaints,
        complaints=complaints,
        plan=topology.plan_id,
        tp=topology.tp_degree,
        fault=run.fault,
        heartbeat_s=HEARTBEAT_S,
        hosts=tuple(hosts),
        restored_s=None if run.fault is Fault.RANK else run.restored_s - run.fault_s,
        resumed_s=None if resumed_at_s is None else resumed_at_s - run.fault_s,
        resumed_at_chunk=stream.restarts[0].chunk_index if stream.restarts else -1,
        restarts=len(stream.restarts),
        chunks=len(stream.finished),
        chunks_replayed=0 if again is None else again["compared"],
        largest_diff=None if again is None else again["largest_diff"],
    )


def _first_chunk_after_restart_s(records: Sequence[Record]) -> float | None:
    openings = [place for place, record in enumerate(records) if isinstance(record, Opened)]
    later = records[openings[-1] :] if len(openings) > 1 else ()
    return next((record.at_s for record in later if isinstance(record, Finished)), None)


def _complaints(
    run: _Run, hosts: Sequence[HostReport], stream: StreamHistory, again: dict[str, Any] | None
) -> Iterator[str]:
    bound_s = CUT_NAMED_S if run.fault is Fault.CABLE else KILL_NAMED_S
    yield from misnamed(hosts, fault=run.fault, topology=run.topology)
    for host in hosts:
        if host.code:
            yield f"host {host.host} ended with {host.code}"
        is_dead = host.host == "b" and _kills_all_of_it(run)
        if host.named_s is None and not is_dead:
            yield f"host {host.host} did not name the loss"
        elif host.named_s is not None and host.named_s > bound_s:
            yield f"host {host.host} named the loss after {host.named_s:.1f} s, not {bound_s:g}"
    if len(stream.restarts) != 1:
        yield f"the stream was resumed {len(stream.restarts)} times, not once"
    summary = json.loads((run.folder / "stream.json").read_text()) if not hosts[0].code else {}
    shown = [chunk["chunk_index"] for chunk in summary.get("chunks", ())]
    if summary.get("ending") != "complete" or shown != list(range(len(shown))):
        yield f"the stream was not shown whole: chunks {shown}"
    if shown != sorted(stream.finished):
        yield "shown and recorded differ"
    if again is None or not again["passed"] or again["compared"] != len(shown):
        yield f"a replay that recomputes at the same chunk is not equal; see {run.folder}"


def _kills_all_of_it(run: _Run) -> bool:
    """Whether no rank was left on the second host to name anything."""
    is_alone = run.topology.tp_degree == 1
    return run.fault is Fault.HOST or (run.fault is Fault.RANK and is_alone)


def main(argv: Sequence[str]) -> int:
    """Exit 0 when the stream survived, 1 when not, 2 where two hosts cannot be made."""
    args = _parser().parse_args(argv)
    fresh_folder(args.out)
    run = _Run(args)
    run.run()
    report = _judge(run)
    print(json.dumps(asdict(report), indent=2) if args.json else table(report), flush=True)
    return 0 if report.passed else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="scripts/lab two_hosts", description=__doc__)
    add = parser.add_argument
    add("--plan", type=one_of(sorted(PIPELINED)), default=PlanId.PP0, help="pp0 (default) or pp1")
    add("--tp", type=positive, default=1, help="generator ranks, all on the second host")
    add("--seconds", type=positive_number, default=45.0, metavar="S", help="length of the video")
    add("--fault", type=Fault, choices=tuple(Fault), default=Fault.CABLE, help="(default cable)")
    add("--lasts", type=positive_number, default=12.0, metavar="S", help="until it is mended")
    add("--model", default=EMBEDDED, metavar="FOLDER", help="a model folder (default: embedded)")
    add(
        "--out",
        type=Path,
        default=Path("out/two-hosts"),
        metavar="FOLDER",
        help="a new or empty one",
    )
    add("--json", action="store_true", help="print one JSON object")
    return parser
