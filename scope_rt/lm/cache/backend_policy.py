"""Which kernel reads a cache follows from the device and the rows, and every refusal says why.

FlashAttention-3 on Hopper, FlashAttention-2 on the generations it is built for, torch's dense
attention elsewhere. The dense lane writes out the scores of every query and row, so it is bounded:
past its bound it refuses instead of running out of memory.
"""

from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import Self

import torch

from scope_contracts.errors import CacheError
from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.page_support import DENSE, FLASH_2, FLASH_3, PageSupport

_HALVES = (DType.FLOAT16, DType.BFLOAT16)
_FLASH_MAX_DIM = 256
_SCORE_BYTES = 4
DENSE_SCORE_BYTES = 1 << 30
"""The most that scores of the dense lane may take, unless told otherwise."""


class Lane(StrEnum):
    """Kernels that decode over a cache."""

    FLASH_3 = "flash_3"
    FLASH_2 = "flash_2"
    DENSE = "dense"

    @property
    def pages(self) -> PageSupport:
        """What the kernel makes of a block table."""
        return {Lane.FLASH_3: FLASH_3, Lane.FLASH_2: FLASH_2, Lane.DENSE: DENSE}[self]

    @property
    def package(self) -> str | None:
        """What must be installed; torch brings the dense lane."""
        packages = {Lane.FLASH_3: "flash_attn_interface", Lane.FLASH_2: "flash_attn"}
        return packages.get(self)


_PREFERENCE = (Lane.FLASH_3, Lane.FLASH_2, Lane.DENSE)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """All that the choice may know of a device, so that it can be made for one that is not here."""

    type: str
    """As in `torch.device`."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None elsewhere."""
    packages: frozenset[str] = frozenset()
    """Of the attention packages, those that are installed."""

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """The traits of a device of this machine."""
        packages = frozenset(lane.package for lane in Lane if lane.package is not None)
        installed = frozenset(name for name in packages if find_spec(name) is not None)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return cls(type=device.type, capability=capability, packages=installed)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneChoice:
    """The kernel, and why not a faster one."""

    lane: Lane
    passed_over: tuple[str, ...]
    """One sentence for each faster lane that does not serve here."""


def choose_lane(traits: DeviceTraits, rows: RowFormat) -> LaneChoice:
    """The fastest lane that serves this device and these rows; the dense one always does."""
    passed_over: list[str] = []
    for lane in _PREFERENCE:
        reason = why_not(lane, traits, rows)
        if reason is None:
            return LaneChoice(lane=lane, passed_over=tuple(passed_over))
        passed_over.append(reason)
    raise AssertionError("the dense lane serves everything")


def why_not(lane: Lane, traits: DeviceTraits, rows: RowFormat) -> str | None:
    """Why `lane` does not serve; None where it does."""
    if lane is Lane.DENSE:
        return None
    if traits.capability is None:
        return f"{lane} needs a CUDA device, this is {traits.type}"
    major, minor = traits.capability
    if lane is Lane.FLASH_3 and major != 9:
        return f"{lane} is built for Hopper (sm_90), this is sm_{major}{minor}"
    if lane is Lane.FLASH_2 and not 8 <= major <= 9:
        return f"{lane} is built for sm_80 to sm_90, this is sm_{major}{minor}"
    if rows.dtype not in _HALVES:
        return f"{lane} takes float16 or bfloat16 rows, these are {rows.dtype}"
    if any(not plane.head_sharded for plane in rows.planes):
        return f"{lane} takes keys and values, these rows are latents"
    widest = max(plane.dim for plane in rows.planes)
    if widest > _FLASH_MAX_DIM:
        return f"{lane} takes heads of up to {_FLASH_MAX_DIM} channels, these have {widest}"
    if lane.package not in traits.packages:
        return f"{lane} needs the package {lane.package}, which is not installed"
    return None


def check_dense_bound(
    *, batch: int, heads: int, queries: int, num_rows: int, bound_bytes: int = DENSE_SCORE_BYTES
) -> None:
    """Refuse dense attention whose scores would not fit.

    Raises:
        CacheError: naming how many queries at a time would.
    """
    a_query = batch * heads * num_rows * _SCORE_BYTES
    if a_query * queries > bound_bytes:
        at_once = bound_bytes // a_query
        fix = (
            f"give at most {at_once} queries at once"
            if at_once
            else "shorten the cache, lower the batch, or share the heads over more ranks"
        )
        raise CacheError(
            f"dense attention of {queries} queries over {num_rows} rows needs "
            f"{a_query * queries} bytes of scores, the bound is {bound_bytes}; {fix}"
        )
