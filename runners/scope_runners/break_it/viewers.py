"""Faults 22 and 23: a full disk and viewers who never read are no business of the stream."""

from scope_rt.faults import FaultPoint
from scope_rt.mesh.topology import Topology
from scope_runners.break_it.audience import UNREAD_CHUNKS
from scope_runners.break_it.events import EventKind
from scope_runners.break_it.faults import at
from scope_runners.break_it.observation import Observation, recorded_chunks
from scope_runners.break_it.scenario import FAULT_CHUNK, PP1, Case, Pace, Scenario, untouched
from scope_runners.break_it.script import Audience


def _disk_full(topology: Topology, pace: Pace) -> Scenario:
    return Scenario(
        topology=topology,
        records=True,
        faults=(at(rank=0, chunk=FAULT_CHUNK, point=FaultPoint.RECORD, action="fill_disk"),),
        expected=untouched(topology, headline="stream whole, failure told"),
        check=_check_recording,
    )


def _check_recording(seen: Observation) -> list[str]:
    """The recording can be read up to its last whole record, and rank0 said why it ends there."""
    complaints = []
    kept = recorded_chunks(seen)
    if not kept or kept != list(range(len(kept))) or len(kept) > FAULT_CHUNK:
        complaints.append(f"the recording holds chunks {kept}")
    if not any("No space left" in note for note in seen.notes):
        complaints.append("nobody said that the recording ended early")
    return complaints


def _idle_viewers(topology: Topology, pace: Pace) -> Scenario:
    return Scenario(
        topology=topology,
        audience=Audience.IDLE,
        expected=untouched(topology, headline="nobody else notices"),
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
        number=22,
        name="disk-full",
        what="no space is left for the recording",
        natural=PP1,
        build=_disk_full,
    ),
    Case(
        number=23,
        name="idle-viewers",
        what="a viewer never reads",
        natural=PP1,
        build=_idle_viewers,
    ),
)
