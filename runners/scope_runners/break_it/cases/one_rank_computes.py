"""Faults 31 to 34: one rank computes otherwise than the others, from the same envelope."""

from functools import partial

from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.numeric import (
    NumericFault,
    one_of_several,
    refused_by_group,
    refused_there,
)

CASES = (
    *NumericFault(
        number=31,
        name="noise-one-rank",
        description="one rank draws other noise before its second step",
        layer=(Detector.REPLICATED,),
        refusal=partial(refused_by_group, "IntegrityError"),
        action="draw_other_noise",
        on=one_of_several,
    ).cases(),
    *NumericFault(
        number=32,
        name="sums-one-rank",
        description="all-reduces give one rank noisy sums",
        layer=(Detector.REPLICATED,),
        refusal=partial(refused_by_group, "IntegrityError"),
        action="add_to_sums",
        arguments={"seed": 1},
        on=one_of_several,
    ).cases(),
    *NumericFault(
        number=33,
        name="output-one-rank",
        description="the last linear layer of one rank is off by a thousandth",
        layer=(Detector.REPLICATED,),
        refusal=partial(refused_by_group, "IntegrityError"),
        action="turn_output",
        on=one_of_several,
    ).cases(),
    *NumericFault(
        number=34,
        name="precision",
        description="one rank multiplies matrices in bfloat16",
        layer=(Detector.NUMERICS, Detector.REPLICATED),
        refusal=partial(refused_there, "IntegrityError"),
        action="set_precision",
    ).cases(),
)
