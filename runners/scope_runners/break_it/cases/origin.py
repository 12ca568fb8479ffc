"""Fault 38: a rank counts the cache's positions from another frame than the others."""

from scope_contracts.integrity import IntegrityLevel
from scope_rt.topology import Topology
from scope_runners.break_it.numeric import NumericFault, cases_of
from scope_runners.break_it.scenario import Expected, last_generator, refused_by


def _refused(topology: Topology, level: IntegrityLevel) -> Expected:
    """No error of integrity, which would be told to the others: they lose the rank."""
    return refused_by(last_generator(topology), topology, "CacheError")


CASES = cases_of(
    NumericFault(
        number=38,
        name="origin-frame",
        description="the frame that positions are counted from is off by one on one rank",
        layer=(),  # the cache itself, which takes no chunk that does not continue it
        refusal=_refused,
        action="move_origin",
        arguments={"by": 1},
    )
)
