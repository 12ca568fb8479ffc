"""Faults 28 to 30: what was computed once, for many chunks, changes in memory."""

from functools import partial

from scope_contracts.integrity import IntegrityLevel
from scope_rt.topology import Topology
from scope_runners.break_it.actions.state import How
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.job import Script, ScriptEvent
from scope_runners.break_it.numeric import NumericFault, refused_by_group, refused_there
from scope_runners.break_it.scenario import FAULT_CHUNK, PP0, Expected

NEXT_PROMPT = Script(events=(ScriptEvent(chunk=FAULT_CHUNK + 1, repeats_prompt=True),))
"""A stream whose text K/V are computed anew right after the fault."""
_there = partial(refused_there, "IntegrityError")


def _refused_alike(topology: Topology, level: IntegrityLevel) -> Expected:
    """By default, ranks that computed the same chunk from it compare first."""
    is_compared = topology.tp_degree > 1 and level is IntegrityLevel.DEFAULT
    refused = refused_by_group if is_compared else refused_there
    return refused("IntegrityError", topology, level)


CASES = (
    *NumericFault(
        number=28,
        name="text-flip",
        description="one bit of the text values flips on one rank",
        layer=(Detector.DERIVED,),
        refusal=_there,
        action="damage_text",
        arguments={"how": How.FLIP},
        takes_turns=True,
    ).cases(),
    *NumericFault(
        number=28,
        name="text-noise",
        description="the text values are noisy on one rank",
        layer=(Detector.DERIVED,),
        refusal=_there,
        action="damage_text",
        arguments={"how": How.NOISE},
        takes_turns=True,
    ).cases(),
    *NumericFault(
        number=29,
        name="text-next-prompt",
        description="the text values change, and a new prompt replaces them",
        layer=(Detector.DERIVED,),
        refusal=_there,
        action="damage_text",
        arguments={"how": How.NOISE},
        takes_turns=True,
        script=NEXT_PROMPT,
    ).cases(),
    *NumericFault(
        number=30,
        name="modulation-flip",
        description="one bit of a step's modulation flips",
        layer=(Detector.DERIVED,),
        refusal=_refused_alike,
        action="damage_modulation",
        arguments={"how": How.FLIP},
        takes_turns=True,
        topology=PP0,
    ).cases(),
    *NumericFault(
        number=30,
        name="modulation-swap",
        description="two rows of a step's modulation change places",
        layer=(Detector.DERIVED,),
        refusal=_refused_alike,
        action="damage_modulation",
        arguments={"how": How.SWAP},
        takes_turns=True,
        topology=PP0,
    ).cases(),
)
