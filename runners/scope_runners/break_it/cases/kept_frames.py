"""Faults 52 to 55: which frames a chunk sees, what they weigh, or which of them stay is wrong."""

from dataclasses import replace
from functools import partial

from scope_contracts.cache_spec import CacheKind
from scope_contracts.integrity import IntegrityLevel
from scope_runners.break_it.cases.arithmetic import A_LONGER_STREAM, AUDITED_CHUNK
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.job import Script
from scope_runners.break_it.numeric import WITHIN, NumericFault, cases_of, refused_there
from scope_runners.break_it.scenario import SINGLE

_FRAMES = partial(
    NumericFault,
    layer=(Detector.CACHED_ROWS,),
    refusal=partial(refused_there, "IntegrityError"),
    topology=SINGLE,
)
_ON_H2O = Script(kv_cache=CacheKind.H2O, needs_its_cache=True)
_ON_GISTS = Script(kv_cache=CacheKind.HIERARCHICAL, needs_its_cache=True)
_WEIGHED = partial(
    _FRAMES,
    number=55,
    action="weigh_past",
    takes_turns=True,
    chunk=AUDITED_CHUNK - WITHIN + 1,
)

CASES = cases_of(
    _FRAMES(
        number=52,
        name="scores-flipped",
        description="the scores by which frames stay change places",
        action="flip_scores",
        script=_ON_H2O,
    ),
    _FRAMES(
        number=53,
        name="masses-misplaced",
        description="the frame that is attended to least gains what all have",
        action="misplace_masses",
        levels=(IntegrityLevel.STRICT,),  # else the last call has its turn much later
        script=replace(_ON_H2O, num_chunks=A_LONGER_STREAM.num_chunks),  # others stay, in time
    ),
    _FRAMES(
        number=54,
        name="gist-of-one",
        description="a gist is the first of its frames, not their mean",
        action="pool_one_frame",
        script=_ON_GISTS,
    ),
    _WEIGHED(
        name="ring-weighs",
        description="past frames have a weight in attention that a ring gives none",
        script=replace(A_LONGER_STREAM, needs_its_cache=True),
    ),
    _WEIGHED(
        name="gists-weigh",
        description="gists weigh something else than their number of frames says",
        script=replace(_ON_GISTS, num_chunks=A_LONGER_STREAM.num_chunks),
    ),
)
