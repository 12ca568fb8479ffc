"""What a stream over two hosts has shown, for a program and for a person."""

from dataclasses import dataclass

_FAULTS = {
    "cable": "the cable was cut",
    "rank": "the leader of the generator group was killed",
    "host": "all processes of host b were killed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """What one host did: the sentence that named the loss, how long after the fault, and the exit
    code. Where all its ranks were killed, none was left to report anything."""

    host: str
    said: str
    named_s: float | None
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoHostsReport:
    """What was seen; seconds are from the fault. It passed exactly if there are no complaints."""

    passed: bool
    complaints: tuple[str, ...]
    plan: str
    tp: int
    fault: str
    heartbeat_s: float
    hosts: tuple[HostReport, ...]
    restored_s: float | None
    """When cable or host were back, where they had to come back."""
    resumed_s: float | None
    """When the next chunk after the fault was there."""
    resumed_at_chunk: int
    restarts: int
    chunks: int
    chunks_replayed: int
    largest_diff: float | None


def table(report: TwoHostsReport) -> str:
    """The report for a person at a terminal."""
    lines = [
        f"hosts      a: rank0; b: {report.tp} generator rank(s); {report.plan} tp {report.tp} over "
        "torchrun",
        "",
        "  seconds  what happened",
        f"     0.00  {_FAULTS[report.fault]}",
    ]
    moments = [
        (host.named_s, f"host {host.host} said: {host.said}")
        for host in report.hosts
        if host.named_s is not None
    ]
    if report.restored_s is not None:
        moments.append((report.restored_s, f"the {report.fault} was back"))
    if report.resumed_s is not None:
        moments.append((report.resumed_s, f"chunk {report.resumed_at_chunk} was there, recomputed"))
    lines += [f"{at_s:>9.2f}  {what}" for at_s, what in sorted(moments)]
    lines += [
        "",
        f"chunks     {report.chunks} shown; {report.restarts} restart",
        f"replay     {report.chunks_replayed} chunks, recomputed at {report.resumed_at_chunk}; "
        f"largest difference {report.largest_diff}",
        *(f"FAILED     {complaint}" for complaint in report.complaints),
    ]
    return "\n".join(lines if report.complaints else [*lines, "passed"])
