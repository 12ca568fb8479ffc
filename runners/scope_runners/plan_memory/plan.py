"""What a rank needs is arithmetic on sizes: it is known, and refused, before a byte is allocated.

Caches are counted exactly, from the same formats that allocate them. What cannot be counted is a
line that says it is an estimate. A GB is 10^9 bytes, a GiB 2^30.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from scope_contracts.row_format import CodecKind

RUNTIME_BYTES = 1 << 30
"""CUDA context, kernels and what the allocator cannot use: an estimate."""
FEWER_BITS: Mapping[CodecKind, Sequence[CodecKind]] = MappingProxyType(
    {
        CodecKind.IDENTITY: (CodecKind.INT8, CodecKind.INT4),
        CodecKind.INT8: (CodecKind.INT4,),
        CodecKind.FP8: (CodecKind.INT4,),
        CodecKind.INT4: (),
    }
)
"""Codecs that take less than each, the next smaller one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One thing that takes memory on one rank."""

    name: str
    num_bytes: int
    because: str
    """How the number comes about, for a reader."""
    is_estimate: bool = False
    is_known: bool = True
    """Whether anybody said what it takes; if not, it is counted as nothing."""


RUNTIME = MemoryLine(
    name="runtime",
    num_bytes=RUNTIME_BYTES,
    because="CUDA context, kernels, fragmentation",
    is_estimate=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All of one rank."""

    lines: tuple[MemoryLine, ...]

    @property
    def num_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the lines that nothing is known about."""
        return tuple(line.name for line in self.lines if not line.is_known)

    def bytes_of(self, name: str) -> int:
        """Bytes of the lines called `name`; 0 where there is none."""
        return sum(line.num_bytes for line in self.lines if line.name == name)

    def fits(self, available_bytes: int) -> bool:
        return self.num_bytes <= available_bytes


class Demand(Protocol):
    """Something that could be run: what it needs, and what could be changed about it."""

    def plan(self) -> MemoryPlan:
        """Bytes of one rank."""
        ...

    def knobs(self) -> Iterable["Knob"]:
        """All that can be changed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be changed, ever further: each setting needs less than the one before."""

    flag: str
    settings: Sequence[Any]
    """As they are typed behind `flag`."""
    turned: Callable[[Any], Demand]

    def fitting(self, available_bytes: int) -> str | None:
        """The smallest change that fits, as typed."""
        first = bisect_left(
            self.settings,
            True,
            key=lambda setting: self.turned(setting).plan().fits(available_bytes),
        )
        return f"{self.flag} {self.settings[first]}" if first < len(self.settings) else None


def fitting_changes(demand: Demand, available_bytes: int) -> tuple[str, ...]:
    """The smallest change of each knob that makes `demand` fit: any one of them is enough.

    Where no change alone is, the first knob is turned as far as it goes, and each answer begins
    with that. Empty where `demand` fits already, or nothing helps.
    """
    if demand.plan().fits(available_bytes):
        return ()
    knobs = [knob for knob in demand.knobs() if knob.settings]
    found = [knob.fitting(available_bytes) for knob in knobs]
    if any(found) or not knobs:
        return tuple(text for text in found if text)
    knob, furthest = knobs[0], knobs[0].settings[-1]
    more = fitting_changes(knob.turned(furthest), available_bytes)
    return tuple(f"{knob.flag} {furthest} {text}" for text in more)
