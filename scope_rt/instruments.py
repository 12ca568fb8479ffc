"""What watches, checks and breaks a stream on purpose is handed in by whoever starts the rank."""

from dataclasses import dataclass, field, fields

from scope_rt.checks import Checks
from scope_rt.faults import Faults, NoFaults
from scope_rt.trace import NullTrace, Trace
from scope_rt.watchdog import Watchdog


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The same for every part of a rank; by default nothing is traced or broken, all is checked."""

    trace: Trace = field(default_factory=NullTrace)
    faults: Faults = field(default_factory=NoFaults)
    checks: Checks = field(default_factory=Checks)
    watchdog: Watchdog = field(default_factory=Watchdog)
    """Of one rank: what it does where a chunk does not end is for whoever owns the process."""

    @property
    def broken_on_purpose(self) -> str:
        """What is not as it should be, in words for a person; "" where all is."""
        told = []
        if not isinstance(self.faults, NoFaults):
            told.append(f"faults are injected ({self.faults})")
        every = fields(Checks)
        off = [check.name for check in every if getattr(self.checks, check.name) != check.default]
        if off:
            how_many = "all" if len(off) == len(every) else "these"
            told.append(f"{how_many} checks are off: {', '.join(off)}")
        return "; ".join(told)
