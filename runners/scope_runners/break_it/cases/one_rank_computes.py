"""Faults 31 to 34: one rank computes otherwise than the others, from the same envelope."""

from functools import partial

from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.numeric import (
    ARITHMETIC,
    NumericFault,
    all_generators,
    cases_of,
    one_of_several,
    refused_by_each,
    refused_by_group,
    refused_there,
    refused_there_in_strict,
)

_OTHERWISE = partial(
    NumericFault,
    layer=(Detector.REPLICATED,),
    refusal=partial(refused_by_group, "IntegrityError"),
    on=one_of_several,
)
_PRECISION = partial(
    NumericFault,
    number=34,
    action="set_precision",
)

CASES = cases_of(
    _OTHERWISE(
        number=31,
        name="noise-one-rank",
        description="one rank draws other noise before its second step",
        layer=(Detector.REPLICATED, Detector.NOISE),
        refusal=refused_there_in_strict,
        action="draw_other_noise",
    ),
    _OTHERWISE(
        number=32,
        name="sums-one-rank",
        description="all-reduces give one rank noisy sums",
        layer=(Detector.REPLICATED, Detector.REDUCED_SUMS),
        action="add_to_sums",
        arguments={"seed": 1},
    ),
    _OTHERWISE(
        number=33,
        name="output-one-rank",
        description="the last linear layer of one rank is off by a thousandth",
        layer=(Detector.REPLICATED, Detector.EDGES),
        refusal=refused_there_in_strict,
        action="turn_output",
    ),
    _PRECISION(
        name="precision-one",
        description="one rank begins to multiply matrices in bfloat16",
        layer=(Detector.NUMERICS, Detector.REPLICATED, Detector.REDUCED_SUMS, *ARITHMETIC),
        refusal=partial(refused_there, "IntegrityError"),
    ),
    _PRECISION(
        name="precision-all",
        description="all ranks begin to multiply matrices in bfloat16",
        layer=(Detector.NUMERICS, Detector.REDUCED_SUMS, Detector.CODEC, *ARITHMETIC),
        refusal=refused_by_each,
        on=all_generators,
    ),
    NumericFault(
        number=34,
        name="attention-switch",
        description="PyTorch's fused attention kernels are switched off on one rank",
        layer=(Detector.NUMERICS,),
        refusal=partial(refused_there, "IntegrityError"),
        action="switch_attention",
    ),
)
