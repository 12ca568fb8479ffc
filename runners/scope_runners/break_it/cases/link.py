"""Fault 37: a number of what travels changes on the link."""

from functools import partial

from scope_contracts.integrity import IntegrityLevel
from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.cases.data import PROMPT_REPEATED
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.numeric import NumericFault, cases_of, rank0
from scope_runners.break_it.scenario import PP0, Expected, refused_by


def _to_the_leader(topology: Topology) -> tuple[int, ...]:
    return rank0(topology) if topology.pipelined else ()


def _refused(topology: Topology, level: IntegrityLevel) -> Expected:
    return refused_by(1, topology, "DigestError")


_FLIP = partial(
    NumericFault,
    number=37,
    refusal=_refused,
    action="flip_bit",
    point=FaultPoint.FRAMES,
    on=_to_the_leader,
    topology=PP0,
)

CASES = cases_of(
    _FLIP(
        name="link-latents",
        description="one bit of latents_in flips on the link",
        layer=(Detector.INPUT_DIGEST, Detector.NOISE),
        arguments={"frame": 1},
    ),
    _FLIP(
        name="link-text",
        description="one bit of the text flips on the link",
        layer=(Detector.INPUT_DIGEST, Detector.STATE_DIGEST),
        arguments={"frame": 2},
        script=PROMPT_REPEATED,
    ),
)
