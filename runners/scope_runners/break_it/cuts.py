"""Faults 6 and 8: a result that comes after the hard cut that made it worthless.

The consumer asks for the cut while the mesh still works on the chunk; nothing of the old epoch may
reach anybody once the first chunk of the new one has.
"""

from functools import partial

from scope_rt.faults import FaultPoint
from scope_rt.mesh.topology import Topology
from scope_runners.break_it.events import EventKind
from scope_runners.break_it.faults import at
from scope_runners.break_it.observation import LEFT, Observation, dropped_chunks, recorded_chunks
from scope_runners.break_it.scenario import (
    FAULT_CHUNK,
    PP0,
    PP1,
    Case,
    Pace,
    Scenario,
    broken_at,
    refused_by,
    untouched,
)
from scope_runners.break_it.script import Audience

DELAY_CHUNKS = 5
"""How late the result is, in chunks."""


def _late(audience: Audience, topology: Topology, pace: Pace) -> Scenario | None:
    if topology.max_in_flight < 2:
        return None  # nothing is under way when a consumer asks for a cut
    delay_s = max(0.5, DELAY_CHUNKS * pace.chunk_s)
    return Scenario(
        topology=topology,
        hard_cut_after=FAULT_CHUNK - 1,
        audience=audience,
        records=True,
        faults=(
            at(
                rank=topology.leader,
                chunk=FAULT_CHUNK,
                point=FaultPoint.RESULT,
                action="delay",
                seconds=delay_s,
            ),
        ),
        expected=untouched(topology, headline=f"chunk {FAULT_CHUNK} dropped"),
        check=_check_pipe if audience is Audience.PIPE else _check_dropped,
    )


def _check_dropped(seen: Observation) -> list[str]:
    """The late chunk was made, and nobody got it."""
    complaints = []
    if FAULT_CHUNK in [event.chunk for event in seen.emitted]:
        complaints.append(f"chunk {FAULT_CHUNK} was emitted after the cut")
    if dropped_chunks(seen) != [FAULT_CHUNK]:
        complaints.append(f"the recording has chunks {dropped_chunks(seen)} as dropped")
    if recorded_chunks(seen) != [event.chunk for event in seen.emitted]:
        complaints.append(f"the recording has chunks {recorded_chunks(seen)} as finished")
    return complaints


def _check_pipe(seen: Observation) -> list[str]:
    """Neither did the viewers, the recording or the video."""
    complaints = _check_dropped(seen)
    newest = max(event.epoch for event in seen.emitted)
    shown = [event.chunk for event in seen.of(EventKind.SHOWN)]
    if shown != [event.chunk for event in seen.emitted if event.epoch == newest]:
        complaints.append(f"the viewer who read late was shown {shown}")
    if "late chunk shown: False" not in seen.notes:
        complaints.append("the viewers' queue took a chunk of the old epoch")
    videos = [note.split()[2::2] for note in seen.notes if note.startswith("video frames: ")]
    if len(videos) != 1 or videos[0][0] != videos[0][1]:
        complaints.append(f"frames in the video, and of what was emitted: {videos}")
    return complaints


def _stale_answer(topology: Topology, pace: Pace) -> Scenario | None:
    """The mesh answers with the result of the chunk before."""
    if not topology.pipelined:
        return None
    return broken_at(
        topology,
        refused_by(0, topology, "OrderError", others=frozenset({"PeerLostError", LEFT})),
        rank=topology.leader,
        point=FaultPoint.RESULT,
        action="instead",
    )


CASES = (
    Case(
        number=6,
        name="late-result",
        what="a result comes after a hard cut",
        natural=PP1,
        build=partial(_late, Audience.LOG),
    ),
    Case(
        number=6,
        name="stale-answer",
        what="the mesh answers with the chunk before",
        natural=PP0,
        build=_stale_answer,
    ),
    Case(
        number=8,
        name="late-result/whole-pipe",
        what="the same with a recorder, a video writer and viewers behind rank0",
        natural=PP1,
        build=partial(_late, Audience.PIPE),
    ),
)
