"""Faults 28 to 30: what was computed once, for many chunks, changes in memory."""

from dataclasses import replace
from functools import partial

from scope_contracts.integrity import IntegrityLevel
from scope_rt.topology import Topology
from scope_runners.break_it.actions.state import How
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.job import Script, ScriptEvent
from scope_runners.break_it.numeric import NumericFault, cases_of, refused_there
from scope_runners.break_it.scenario import FAULT_CHUNK, PEER_LOST, PP0, Expected

UNSEEN_CHUNK = FAULT_CHUNK + 1
"""Where the rotation of a short stream is at weights, not at what was derived from them."""
NEXT_PROMPT = Script(events=(ScriptEvent(chunk=UNSEEN_CHUNK + 1, repeats_prompt=True),))
"""A stream whose text K/V are computed anew right after the fault."""


def _refused_alike(topology: Topology, level: IntegrityLevel) -> Expected:
    """By default the ranks that compare results with it refuse as well, if no turn came first."""
    there = refused_there("IntegrityError", topology, level)
    if level is IntegrityLevel.STRICT:
        return there
    ends = list(there.ends)
    for rank in topology.generator_ranks:
        if ends[rank] == PEER_LOST:
            ends[rank] = PEER_LOST | {"IntegrityError"}
    return replace(there, ends=tuple(ends))


_TEXT = partial(
    NumericFault,
    number=28,
    layer=(Detector.DERIVED, Detector.LINEAR_SUMS, Detector.ORACLE),
    refusal=partial(refused_there, "IntegrityError"),
    action="damage_text",
    takes_turns=True,
)
_MODULATION = partial(
    NumericFault,
    number=30,
    layer=(Detector.DERIVED, Detector.LINEAR_SUMS, Detector.ORACLE),
    refusal=_refused_alike,
    action="damage_modulation",
    takes_turns=True,
    topology=PP0,
)

CASES = cases_of(
    _TEXT(
        name="text-flip",
        description="one bit of the text values flips on one rank",
        arguments={"how": How.FLIP},
    ),
    _TEXT(
        name="text-noise",
        description="the text values are noisy on one rank",
        arguments={"how": How.NOISE},
    ),
    _TEXT(
        number=29,
        name="text-next-prompt",
        description="the text values change, and a new prompt replaces them",
        arguments={"how": How.NOISE},
        chunk=UNSEEN_CHUNK,
        script=NEXT_PROMPT,
    ),
    _MODULATION(
        name="modulation-flip",
        description="one bit of a step's modulation flips",
        arguments={"how": How.FLIP},
    ),
    _MODULATION(
        name="modulation-swap",
        description="two rows of a step's modulation change places",
        arguments={"how": How.SWAP},
    ),
)
