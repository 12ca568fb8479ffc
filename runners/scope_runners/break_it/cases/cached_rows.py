"""Faults 26 and 27: rows of the cache change where they lie, or were never written there."""

from functools import partial

from scope_runners.break_it.actions.state import How
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.numeric import NumericFault, refused_there

_WHAT = {
    How.FLIP: "one bit of one cached row flips",
    How.NOISE: "the rows of one cached frame are noisy",
    How.ZEROS: "the rows of one cached frame are zero",
    How.NAN: "the rows of one cached frame are NaN",
    How.SWAP: "two rows of one cached frame change places",
}
_refused = partial(refused_there, "IntegrityError")

CASES = (
    *(
        case
        for how, description in _WHAT.items()
        for case in NumericFault(
            number=26,
            name=f"rows-{how}",
            description=f"{description}, on one rank",
            layer=(Detector.ROWS,),
            refusal=_refused,
            action="damage_rows",
            arguments={"how": how},
            takes_turns=True,
        ).cases()
    ),
    *NumericFault(
        number=27,
        name="skipped-write",
        description="one layer's rows are never written to the cache, on one rank",
        layer=(Detector.ROWS,),
        refusal=_refused,
        action="skip_writes",
        takes_turns=True,
    ).cases(),
)
