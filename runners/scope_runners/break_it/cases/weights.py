"""Faults 24 and 25: a weight changes in memory, also in ways that leave a plain sum as it was."""

from functools import partial

from scope_runners.break_it.actions.state import How
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.numeric import NumericFault, cases_of, refused_there

_WHAT = {
    How.FLIP: "the lowest bit of one weight of one rank flips",
    How.SWAP: "two rows of one weight of one rank change places",
    How.SHUFFLE: "all rows of one weight of one rank change places",
    How.SAME_SUM: "two numbers of one weight of one rank change, and their sum stays",
}
_NAMES = {How.SAME_SUM: "same-sum"}

CASES = cases_of(
    *(
        NumericFault(
            number=24 if how is How.FLIP else 25,
            name=f"weight-{_NAMES.get(how, how)}",
            description=description,
            layer=(Detector.FINGERPRINT, Detector.LINEAR_SUMS),
            refusal=partial(refused_there, "FingerprintError"),
            action="damage_weight",
            arguments={"name": "blocks.1.ffn.net.0.proj.weight", "how": how},
            takes_turns=True,
        )
        for how, description in _WHAT.items()
    )
)
