"""Faults 26 and 27: rows of the cache change where they lie, or were never written there."""

from dataclasses import replace
from functools import partial

from scope_contracts.integrity import IntegrityLevel
from scope_rt.topology import Topology
from scope_runners.break_it.actions.state import How
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.numeric import ARITHMETIC, NumericFault, cases_of, refused_there
from scope_runners.break_it.scenario import IN_ORDER, PEER_LOST, SINGLE, Expected

_WHAT = {
    How.FLIP: "one bit of one cached row flips",
    How.NOISE: "the rows of one cached frame are noisy",
    How.ZEROS: "the rows of one cached frame are zero",
    How.SWAP: "two rows of one cached frame change places",
}


def _refused_nan(topology: Topology, level: IntegrityLevel) -> Expected:
    """NaN spreads: other ranks find it in what they compute, and rank0 in the latents."""
    there = refused_there("IntegrityError", topology, level)
    first, *others = there.ends
    found = PEER_LOST | {"IntegrityError"}
    ends = (first | found, *(end | found | IN_ORDER for end in others))
    return replace(there, ends=ends)


_ROWS = partial(
    NumericFault, refusal=partial(refused_there, "IntegrityError"), layer=(Detector.ROWS,)
)
_CHANGED = partial(_ROWS, number=26, action="damage_rows")

CASES = cases_of(
    *(
        _CHANGED(
            name=f"rows-{how}",
            description=f"{description}, on one rank",
            arguments={"how": how},
            takes_turns=True,
        )
        for how, description in _WHAT.items()
    ),
    _CHANGED(
        name="rows-nan",
        description="the rows of one cached frame are NaN, on one rank",
        arguments={"how": How.NAN},
        layer=(Detector.ROWS, Detector.VALUES, Detector.CACHED_ROWS, *ARITHMETIC),
        refusal=_refused_nan,
        topology=SINGLE,
    ),
    _ROWS(
        number=27,
        name="skipped-write",
        description="one layer's rows are never written to the cache, on one rank",
        layer=(Detector.ROWS, Detector.CACHED_ROWS),
        action="skip_writes",
        takes_turns=True,
    ),
)
