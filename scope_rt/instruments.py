"""What watches, checks and breaks a stream on purpose is handed in by whoever starts the rank."""

from dataclasses import dataclass, field

from scope_rt.checks import Checks
from scope_rt.faults import Faults, NoFaults
from scope_rt.trace import NullTrace, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The same for every part of a rank; by default nothing is traced or broken, all is checked."""

    trace: Trace = field(default_factory=NullTrace)
    faults: Faults = field(default_factory=NoFaults)
    checks: Checks = field(default_factory=Checks)
