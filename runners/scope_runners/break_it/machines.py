"""Fault 19: the cable between two hosts is cut, and joined again."""

from scope_rt.mesh.topology import Topology
from scope_runners.break_it.scenario import PEER_LOST, PP0, Case, Expected, Pace, Scenario

PAUSE_S = 0.25
"""Between two chunks, so that the cable is cut in the middle of a stream."""


def _cut(topology: Topology, pace: Pace) -> Scenario | None:
    if topology.world_size == 1:
        return None
    ranks = " ".join(map(str, range(topology.world_size)))
    return Scenario(
        topology=topology,
        cuts_cable=True,
        pause_s=PAUSE_S,
        expected=Expected(
            headline=f"LinkTimeoutError {ranks}",
            ends=(PEER_LOST,) * topology.world_size,
            # The far host waits for a store that gives no answer, which may take the bound again.
            within_s=pace.silence_s + pace.heartbeat_s,
            mentions="rank 1" if topology.world_size == 2 else "ranks 1",
            resumes=True,
        ),
    )


CASES = (
    Case(
        number=19,
        name="cable-cut",
        what="no packet passes between two hosts for a while",
        natural=PP0,
        build=_cut,
    ),
)
