"""Faults 44 to 51: what enters and leaves the blocks is wrong, or what was made for many chunks.

Unless it says otherwise, all ranks are wrong alike, so that nothing which compares them can see it.
"""

from functools import partial

from scope_rt.faults import FaultPoint
from scope_runners.break_it.cases.arithmetic import A_LONGER_STREAM, AUDITED_CHUNK
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.job import Script, ScriptEvent
from scope_runners.break_it.numeric import (
    ARITHMETIC,
    WITHIN,
    NumericFault,
    all_generators,
    cases_of,
    rank0,
    refused_by_each,
)
from scope_runners.break_it.scenario import FAULT_CHUNK, TP2

A_STREAM_THAT_REPEATS = Script(events=(ScriptEvent(chunk=FAULT_CHUNK, repeats_prompt=True),))
"""Text K/V are made again in the chunk of the fault."""

_EDGE = partial(
    NumericFault,
    layer=(Detector.EDGES,),
    refusal=refused_by_each,
    on=all_generators,
    takes_turns=True,
    topology=TP2,
    chunk=AUDITED_CHUNK - WITHIN + 1,
    script=A_LONGER_STREAM,
)
_MADE = partial(
    NumericFault,
    layer=(Detector.MADE_STATE,),
    refusal=refused_by_each,
    on=all_generators,
    topology=TP2,
)

CASES = cases_of(
    _EDGE(
        number=44,
        name="patches",
        description="the first block is given one token off by a thousandth",
        action="change_patches",
    ),
    _EDGE(
        number=45,
        name="head",
        description="the head's product is off by a thousandth for one token",
        action="change_head",
    ),
    _EDGE(
        number=46,
        name="sigma",
        description="noise levels are those of another shift",
        layer=(Detector.NUMERICS, Detector.EDGES),
        action="change_schedule",
    ),
    _EDGE(
        number=47,
        name="noise-all-ranks",
        description="all ranks draw the re-noise of another seed",
        layer=(Detector.NOISE,),
        action="draw_other_noise",
    ),
    _EDGE(
        number=48,
        name="start-noise",
        description="rank0 starts a chunk from the noise of another seed",
        layer=(Detector.NOISE,),
        action="draw_other_start",
        point=FaultPoint.PLANNED,
        on=rank0,
        chunk=AUDITED_CHUNK,
    ),
    _EDGE(
        number=49,
        name="clean-timestep",
        description="clean passes are told the timestep of the first step",
        layer=ARITHMETIC,
        action="soil_clean_pass",
    ),
    _EDGE(
        number=49,
        name="clean-input",
        description="clean passes are given other latents than were shown",
        action="feed_other_latents",
        takes_turns=False,
    ),
    _MADE(
        number=50,
        name="text-made",
        description="text K/V are off by a hundredth when they are made",
        layer=(Detector.MADE_STATE, Detector.REDUCED_SUMS),  # keys tell what ranks added up
        action="scale_text",
        script=A_STREAM_THAT_REPEATS,
    ),
    _MADE(
        number=51,
        name="modulation-made",
        description="modulations are made again, for the timesteps after theirs",
        action="remake_modulations",
    ),
)
