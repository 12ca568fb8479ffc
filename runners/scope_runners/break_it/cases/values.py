"""Faults 35 and 36: latents or a picture that no model computes."""

from functools import partial
from math import nan

from scope_rt.faults import FaultPoint
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.numeric import NumericFault, cases_of, leader, rank0, refused_by_rank0
from scope_runners.break_it.scenario import PP0

_VALUES = partial(
    NumericFault,
    layer=(Detector.VALUES, Detector.KEPT, Detector.EMITTED),
    refusal=partial(refused_by_rank0, "IntegrityError"),
    topology=PP0,
)
_LATENTS = partial(_VALUES, number=35, point=FaultPoint.RESULT, on=leader)

CASES = cases_of(
    _LATENTS(
        name="latents-zeros",
        description="all latents of a chunk are zero",
        action="fill_latents",
        arguments={"value": 0.0},
    ),
    _LATENTS(
        name="latents-nan",
        description="all latents of a chunk are NaN",
        action="fill_latents",
        arguments={"value": nan},
    ),
    _LATENTS(
        name="latents-repeated",
        description="the latents of a chunk are those of the one before",
        action="repeat_latents",
    ),
    _VALUES(
        number=36,
        layer=(Detector.DECODED,),
        name="picture-blank",
        description="the decoder shows nothing of latents that vary",
        action="blank",
        point=FaultPoint.DECODED,
        on=rank0,
    ),
)
