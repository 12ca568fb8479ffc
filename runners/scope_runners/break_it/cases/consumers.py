"""Faults 6, 8, 22 and 23: what reaches rank0's consumers, and what they must not do to the stream.

A result that arrives after a hard cut is dropped; a full disk and viewers that never read stop
nothing.
"""

from functools import partial

from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.consumer import UNREAD_CHUNKS
from scope_runners.break_it.events import EventKind
from scope_runners.break_it.faults import at
from scope_runners.break_it.job import ConsumerKind
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
    unaffected,
)

DELAY_CHUNKS = 5
"""How late the result is, in chunks."""


def _late(consumer_kind: ConsumerKind, topology: Topology, pace: Pace) -> Scenario | None:
    if topology.max_in_flight < 2:
        return None  # nothing is under way when a consumer asks for a cut
    delay_s = max(0.5, DELAY_CHUNKS * pace.chunk_s)
    return Scenario(
        topology=topology,
        hard_cut_after=FAULT_CHUNK - 1,
        consumer_kind=consumer_kind,
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
        expected=unaffected(topology, headline=f"chunk {FAULT_CHUNK} dropped"),
        check=_check_pipe if consumer_kind is ConsumerKind.PIPE else _check_dropped,
    )


def _check_dropped(seen: Observation) -> list[str]:
    """The late chunk was generated and dropped, and no consumer received it."""
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


def _disk_full(topology: Topology, pace: Pace) -> Scenario:
    return Scenario(
        topology=topology,
        records=True,
        faults=(at(rank=0, chunk=FAULT_CHUNK, point=FaultPoint.RECORD, action="fill_disk"),),
        expected=unaffected(topology, headline="whole, failure reported"),
        check=_check_recording,
    )


def _check_recording(seen: Observation) -> list[str]:
    """The recording is readable up to its last whole record; rank0 reported why it ends there."""
    complaints = []
    kept = recorded_chunks(seen)
    if not kept or kept != list(range(len(kept))) or len(kept) > FAULT_CHUNK:
        complaints.append(f"the recording holds chunks {kept}")
    if not any("No space left" in note for note in seen.notes):
        complaints.append("no rank reported that the recording ended early")
    return complaints


def _idle_viewers(topology: Topology, pace: Pace) -> Scenario:
    return Scenario(
        topology=topology,
        consumer_kind=ConsumerKind.IDLE,
        expected=unaffected(topology, headline="no other effect"),
        check=_check_viewers,
    )


def _check_viewers(seen: Observation) -> list[str]:
    """The one who reads was shown everything, the one who does not lost the rest of it."""
    complaints, num_emitted = [], len(seen.emitted)
    shown = [event.chunk for event in seen.of(EventKind.SHOWN)]
    if shown != [event.chunk for event in seen.emitted]:
        complaints.append(f"the other viewer was shown chunks {shown}")
    if f"idle viewer lost: {num_emitted - UNREAD_CHUNKS}" not in seen.notes:
        complaints.append(f"of {num_emitted} chunks, the idle viewer: {seen.notes}")
    return complaints


CASES = (
    Case(
        number=6,
        name="late-result",
        description="a result comes after a hard cut",
        default_topology=PP1,
        build=partial(_late, ConsumerKind.LOG),
    ),
    Case(
        number=6,
        name="stale-answer",
        description="the mesh answers with the chunk before",
        default_topology=PP0,
        build=_stale_answer,
    ),
    Case(
        number=8,
        name="late-result/whole-pipe",
        description="the same with a recorder, a video writer and viewers behind rank0",
        default_topology=PP1,
        build=partial(_late, ConsumerKind.PIPE),
    ),
    Case(
        number=22,
        name="disk-full",
        description="no space is left for the recording",
        default_topology=PP1,
        build=_disk_full,
    ),
    Case(
        number=23,
        name="idle-viewers",
        description="a viewer never reads",
        default_topology=PP1,
        build=_idle_viewers,
    ),
)
