"""What a rank needs is arithmetic on sizes: it is known, and refused, before a byte is allocated.

Caches are counted exactly, from the same formats that allocate them. What cannot be counted is a
line that says it is an estimate.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
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


def shown_size(num_bytes: int) -> str:
    """In GiB, by which GPUs are sold; what is smaller than one, in a smaller unit."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):,.2f} {unit}"
    return f"{num_bytes} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One thing that takes memory on one rank."""

    name: str
    num_bytes: int
    because: str
    """How the number comes about, for a reader."""
    is_estimate: bool = False
    is_known: bool = True
    """Whether its size is known; if not, it is counted as 0."""


RUNTIME = MemoryLine(
    name="runtime",
    num_bytes=RUNTIME_BYTES,
    because="CUDA context, kernels, fragmentation",
    is_estimate=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All that one rank holds."""

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


class Place(StrEnum):
    """Where ranks of one role lie."""

    OWN_GPU = "a GPU each"
    ONE_GPU = "one GPU"
    CPU = "the CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Ranks of one role, which all hold the same; or those that share a GPU, and `plan` is of them
    together."""

    role: str
    ranks: tuple[int, ...]
    plan: MemoryPlan
    place: Place = Place.OWN_GPU

    @property
    def num_gpus(self) -> int:
        return {Place.OWN_GPU: len(self.ranks), Place.ONE_GPU: 1, Place.CPU: 0}[self.place]

    def fits(self, available_bytes: int) -> bool | None:
        """Whether a GPU of that size has room; None of what lies on none."""
        return self.plan.fits(available_bytes) if self.num_gpus else None


class Requirement(Protocol):
    """Something that could be run: what it needs, and what could be changed about it."""

    def rank_memory(self) -> tuple[RankMemory, ...]:
        """All ranks, by role."""
        ...

    def options(self) -> Iterable["Option"]:
        """All that can be changed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One thing that can be changed, ever further: each value needs less than the one before."""

    flag: str
    values: Sequence[Any]
    """As they are typed behind `flag`."""
    changed_to: Callable[[Any], Requirement]

    def fitting(self, available_bytes: int) -> str | None:
        """The smallest change that fits, as typed."""
        first = bisect_left(
            self.values,
            True,
            key=lambda value: fits(self.changed_to(value), available_bytes),
        )
        return f"{self.flag} {self.values[first]}" if first < len(self.values) else None


def fits(requirement: Requirement, available_bytes: int) -> bool:
    """Whether every rank on a GPU fits one of that size."""
    return all(part.fits(available_bytes) is not False for part in requirement.rank_memory())


def fitting_changes(requirement: Requirement, available_bytes: int) -> tuple[str, ...]:
    """The smallest change of each option that makes `requirement` fit: any one of them is enough.

    Where no change alone is, the first option is changed as far as it goes, and each answer begins
    with that. Empty where `requirement` fits already, or nothing helps.
    """
    if fits(requirement, available_bytes):
        return ()
    options = [option for option in requirement.options() if option.values]
    found = [option.fitting(available_bytes) for option in options]
    if any(found) or not options:
        return tuple(text for text in found if text)
    option, furthest = options[0], options[0].values[-1]
    more = fitting_changes(option.changed_to(furthest), available_bytes)
    return tuple(f"{option.flag} {furthest} {text}" for text in more)
