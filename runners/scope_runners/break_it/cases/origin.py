"""Fault 38: a rank counts the cache's positions from another frame than the others."""

from functools import partial

from scope_runners.break_it.numeric import NumericFault, refused_there

CASES = NumericFault(
    number=38,
    name="origin-frame",
    description="the frame that positions are counted from is off by one on one rank",
    layer=(),  # the cache itself, which takes no chunk that does not continue it
    refusal=partial(refused_there, "CacheError"),
    action="move_origin",
    arguments={"by": 1},
).cases()
