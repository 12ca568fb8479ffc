"""The same ranks on two hosts: rank0 on one, the others on the other, each under its own torchrun.

The hosts are network namespaces of this machine. The connection between them is cut once rank0 has
emitted the chunk at which faults happen, and restored when both ends have had time to notice.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.events import EventKind, EventLog, read_events
from scope_runners.break_it.faults import InjectedFault
from scope_runners.break_it.job import RankJob
from scope_runners.break_it.scenario import FAULT_CHUNK
from scope_runners.break_it.watch import GONE_WITHIN_S, RANK_MODULE, Watch
from scope_runners.namespaces import INTERFACE, CabledHosts, torchrun

CUT = "cut_cable"
_POLL_S = 0.02


def start_on_two_hosts(
    job: RankJob, topology: Topology, environ: Mapping[str, str], watch: Watch, *, cut_s: float
) -> None:
    """Run the ranks of `job` to their end; the connection is cut for `cut_s` meanwhile."""
    job.save()
    with ExitStack() as stack:
        cabled = stack.enter_context(CabledHosts())
        processes = []
        for host, num_ranks in zip(cabled.hosts, (1, topology.world_size - 1), strict=True):
            output = stack.enter_context((Path(job.folder) / f"{host.name}.txt").open("wb"))
            program = (RANK_MODULE, str(job.path))
            command = torchrun(host, store=cabled.hosts[0], num_ranks=num_ranks, program=program)
            network = {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
            processes.append(host.start(command, environ={**environ, **network}, output=output))
            watch.add(processes[-1].pid)

        def ended() -> bool:
            if watch.is_stopped:
                raise KeyboardInterrupt
            return watch.has_overrun or all(process.poll() is not None for process in processes)

        _wait_for(lambda: ended() or _has_emitted(job, FAULT_CHUNK))
        _log_cut(job)
        cabled.cut()
        time.sleep(cut_s)
        cabled.restore()
        EventLog(job.events, rank=-1, attempt=0).write(EventKind.RESTORED)
        _wait_for(ended)
        for host, process in zip(cabled.hosts, processes, strict=True):
            what = f"torchrun on host {host.name}"
            code = process.wait(GONE_WITHIN_S)  # it has ended, or the watch has ended it
            EventLog(job.events, rank=-1, attempt=0).write(EventKind.ENDED, text=what, code=code)
        # Leaving the hosts ends whatever still runs there.
        watch.note_survivors(lambda: [pid for host in cabled.hosts for pid in host.processes()])


def _has_emitted(job: RankJob, chunk: int) -> bool:
    return any(e.kind is EventKind.EMITTED and e.chunk >= chunk for e in read_events(job.events))


def _log_cut(job: RankJob) -> None:
    """Write the cut to the log of faults, as any other fault."""
    cut = InjectedFault(
        action=CUT,
        point=FaultPoint.EMIT,
        rank=-1,
        attempt=0,
        chunk=FAULT_CHUNK,
        at_s=time.monotonic(),
    )
    job.faults.write_text(json.dumps(asdict(cut)) + "\n")


def _wait_for(is_so: Callable[[], bool]) -> None:
    """Blocks until `is_so`; the run's watch ends the processes at its bound."""
    while not is_so():
        time.sleep(_POLL_S)
