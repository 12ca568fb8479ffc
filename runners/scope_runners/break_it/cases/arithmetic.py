"""Faults 39 to 43, and 80: ranks hold and send what they must, and compute something else from it.

All ranks do so alike, or a sum spreads it to all of them, so that nothing which compares ranks can
see it: only computing again can.
"""

from functools import partial

from scope_contracts.integrity import IntegrityLevel
from scope_rt.integrity.canary import ROTATIONS
from scope_rt.integrity.verifier import AUDITED_CHUNKS
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.job import Script
from scope_runners.break_it.numeric import (
    WITHIN,
    NumericFault,
    all_generators,
    cases_of,
    refused_by_group,
    refused_there,
)
from scope_runners.break_it.scenario import SINGLE, TP2

AUDITED_CHUNK = AUDITED_CHUNKS
"""The first after chunk 0 in which the default computes something again."""
A_LONGER_STREAM = Script(num_chunks=AUDITED_CHUNK + 2)
CANARY_CHUNK = ROTATIONS * WITHIN
"""The first after chunk 0 before which the fixed chunk is run."""

_COMPUTED = partial(
    NumericFault,
    layer=(Detector.ORACLE,),
    refusal=partial(refused_there, "IntegrityError"),
    takes_turns=True,
    topology=SINGLE,
    chunk=AUDITED_CHUNK - WITHIN + 1,
    script=A_LONGER_STREAM,
)

CASES = cases_of(
    NumericFault(
        number=39,
        name="sums-all-ranks",
        description="all-reduces give all ranks the same noisy sums",
        layer=(Detector.REDUCED_SUMS,),
        refusal=partial(refused_by_group, "IntegrityError"),
        action="add_to_sums",
        arguments={"seed": 1},
        on=lambda topology: all_generators(topology) if topology.tp_degree > 1 else (),
        takes_turns=True,
        topology=TP2,
        chunk=AUDITED_CHUNK - WITHIN + 1,
        script=A_LONGER_STREAM,
    ),
    _COMPUTED(
        number=40,
        name="bias-computed",
        description="the bias is another one after ranks have compared it",
        action="change_bias",
    ),
    _COMPUTED(
        number=41,
        name="kernel",
        description="attention takes the newest value for zero",
        action="change_kernel",
    ),
    _COMPUTED(
        number=42,
        name="rotations",
        description="rotation tables are those of the frame before",
        layer=(Detector.ORACLE, Detector.EDGES),
        action="turn_rotations",
    ),
    _COMPUTED(
        number=43,
        name="early-write",
        description="a layer's rows are written at a chunk's last call only",
        levels=(IntegrityLevel.STRICT,),  # else its layer and calls have their turn much later
        layer=(Detector.CACHED_ROWS,),
        action="skip_early_writes",
    ),
    _COMPUTED(
        number=80,
        name="last-block",
        description="the last block is off at the first step, which has its turn much later",
        layer=(Detector.CANARY, Detector.ORACLE),
        refusal=partial(refused_by_group, "IntegrityError"),
        action="turn_last_block",
        on=all_generators,
        chunk=CANARY_CHUNK - WITHIN + 1,
        script=Script(num_chunks=CANARY_CHUNK + 2),
    ),
)
