"""Fault 68: what a person asked for is lost on rank0."""

from scope_contracts.integrity import IntegrityLevel
from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.job import Script, ScriptEvent
from scope_runners.break_it.numeric import NumericFault, cases_of, rank0
from scope_runners.break_it.scenario import FAULT_CHUNK, IN_ORDER, PP0, Expected, refused_by


def _refused(topology: Topology, level: IntegrityLevel) -> Expected:
    return refused_by(0, topology, "IntegrityError", others=IN_ORDER | {"IntegrityError"})


CASES = cases_of(
    NumericFault(
        number=68,
        name="control-lost",
        description="a hard cut that was asked for is lost on rank0",
        layer=(Detector.PLANNED,),
        refusal=_refused,
        action="lose_control",
        point=FaultPoint.TAKEN,
        on=rank0,
        topology=PP0,
        script=Script(events=(ScriptEvent(chunk=FAULT_CHUNK, hard_cut=True),)),
    )
)
