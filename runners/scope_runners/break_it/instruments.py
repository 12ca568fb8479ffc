"""The faults and disarmed detectors of a rank; the only reader of SCOPE_FAULTS and SCOPE_DISARM."""

import os
from collections.abc import Mapping

from scope_rt.faults import Faults, NoFaults
from scope_rt.instruments import Instruments
from scope_rt.launch_environment import LaunchEnvironment
from scope_runners.break_it.detectors import checks_without, detectors_named
from scope_runners.break_it.faults import InjectedFaults, decode

FAULTS = "SCOPE_FAULTS"
"""Holds the plan of faults, as `faults.encode` writes it."""
DISARM = "SCOPE_DISARM"
"""Holds the names of detectors, separated by commas."""


def instruments_from_environment(environ: Mapping[str, str] | None = None) -> Instruments:
    """What breaks this rank, and which checks it is without.

    Raises:
        UserInputError: a variable cannot be read; the sentence names it.
    """
    env = os.environ if environ is None else environ
    rank, faults = LaunchEnvironment.from_environment(env), env.get(FAULTS)
    injected: Faults = NoFaults()
    if faults is not None and (plan := decode(faults)).faults:
        injected = InjectedFaults(plan, rank=rank.rank, attempt=rank.attempt)
    names = [name for name in env.get(DISARM, "").split(",") if name]
    return Instruments(faults=injected, checks=checks_without(detectors_named(names)))
