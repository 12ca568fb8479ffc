"""What watches a stream, and what breaks it on purpose, is handed in together and costs nothing."""

from dataclasses import dataclass, field

from scope_rt.faults import Faults, NoFaults
from scope_rt.trace import NullTrace, Trace
from scope_rt.tripwires import ALL_ARMED, Tripwires


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The same for every part of a rank; the defaults watch nothing and break nothing."""

    trace: Trace = field(default_factory=NullTrace)
    faults: Faults = field(default_factory=NoFaults)
    tripwires: Tripwires = ALL_ARMED
