"""How much memory a known GPU has is looked up, never guessed."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scope_contracts.errors import UserInputError, mismatch
from scope_runners.wording import nearest

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU type. `memory_mib` is what the driver reports, which is not the name's number."""

    name: str
    memory_mib: int

    @property
    def num_bytes(self) -> int:
        return self.memory_mib * MIB


_ALL = (
    Gpu(name="a100-40gb", memory_mib=40_960),
    Gpu(name="a100-80gb", memory_mib=81_920),
    Gpu(name="a10g", memory_mib=23_028),
    Gpu(name="rtx-3090", memory_mib=24_576),
    Gpu(name="rtx-4090", memory_mib=24_564),
    Gpu(name="l4", memory_mib=23_034),
    Gpu(name="l40s", memory_mib=46_068),
    Gpu(name="h100", memory_mib=81_559),
    Gpu(name="h200", memory_mib=143_771),
    Gpu(name="b200", memory_mib=183_359),
    Gpu(name="rtx-5090", memory_mib=32_607),
    Gpu(name="gb10", memory_mib=122_502),
)
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _ALL})
"""By name. GB10 shares its memory with the CPU."""


def gpu_named(name: str) -> Gpu:
    """The GPU called `name`, in any case.

    Raises `UserInputError` naming those that are known.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        want = f"one of {', '.join(GPUS)}{nearest(name.lower(), GPUS)}"
        fix = "or give --gpu-gib"
        raise UserInputError(mismatch("--gpu", got=name, want=want, fix=fix))
    return gpu
