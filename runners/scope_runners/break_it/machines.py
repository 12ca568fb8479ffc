"""Fault 19: the cable between two hosts is cut, and joined again."""

from scope_rt.mesh.topology import Topology
from scope_runners.break_it.scenario import PEER_LOST, PP0, Case, Expected, Pace, Scenario

PAUSE_S = 0.25
"""Between two chunks, so that the cable is cut in the middle of a stream."""
FAR_IS_SILENT = r"\branks? 1(, \d+)* sent no heartbeat"
STORE_IS_SILENT = r"did not answer|\branks? [1-9][\d, ]* closed the connection"
"""What each host says of the cut; on the far one a rank may also see its neighbour leave first."""


def _cut(topology: Topology, pace: Pace) -> Scenario | None:
    if topology.world_size == 1:
        return None
    _, *far = range(topology.world_size)
    return Scenario(
        topology=topology,
        cuts_cable=True,
        pause_s=PAUSE_S,
        expected=Expected(
            headline=f"LinkTimeoutError {' '.join(map(str, (0, *far)))}",
            ends=(PEER_LOST,) * topology.world_size,
            within_s=pace.heartbeat_s,
            names={0: FAR_IS_SILENT, **dict.fromkeys(far, STORE_IS_SILENT)},
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
