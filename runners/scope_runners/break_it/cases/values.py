"""Faults 35 and 36: latents or a picture that no model computes."""

from functools import partial
from math import nan

from scope_rt.faults import FaultPoint
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.numeric import NumericFault, leader, rank0, refused_by_rank0
from scope_runners.break_it.scenario import PP0

_refused = partial(refused_by_rank0, "IntegrityError")

CASES = (
    *(
        case
        for name, value, what in (("zeros", 0.0, "zero"), ("nan", nan, "NaN"))
        for case in NumericFault(
            number=35,
            name=f"latents-{name}",
            description=f"all latents of a chunk are {what}",
            layer=(Detector.VALUES,),
            refusal=_refused,
            action="fill_latents",
            arguments={"value": value},
            point=FaultPoint.RESULT,
            on=leader,
            topology=PP0,
        ).cases()
    ),
    *NumericFault(
        number=35,
        name="latents-repeated",
        description="the latents of a chunk are those of the one before",
        layer=(Detector.VALUES,),
        refusal=_refused,
        action="repeat_latents",
        point=FaultPoint.RESULT,
        on=leader,
        topology=PP0,
    ).cases(),
    *NumericFault(
        number=36,
        name="picture-blank",
        description="the decoder shows nothing of latents that vary",
        layer=(Detector.VALUES,),
        refusal=_refused,
        action="blank",
        point=FaultPoint.DECODED,
        on=rank0,
        topology=PP0,
    ).cases(),
)
