"""Counts where a GPU would have to be waited for, on any device; not a test itself."""

from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    getattr(Tensor, name): name
    for name in (
        *("tolist", "item", "cpu", "numpy"),
        *("__bool__", "__int__", "__float__", "__index__"),
    )
}
"""Methods that bring values to the host. On a CPU tensor some of them reach no kernel."""

_KERNELS = ("_local_scalar_dense", "_unique2", "nonzero", "masked_select", "equal")
"""The host needs their result, or its shape; so it does where an index is a mask."""


class Waits(ExitStack):
    """While it is entered: calls after which a GPU would have to be waited for, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __enter__(self) -> Self:
        self.enter_context(_Kernels(self.names))
        self.enter_context(_Reads(self.names))
        return super().__enter__()


class _Reads(TorchFunctionMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func not in _READS:
            return func(*args, **(kwargs or {}))
        self._names.append(_READS[func])
        counted = len(self._names)
        result = func(*args, **(kwargs or {}))
        del self._names[counted:]  # its own kernels
        return result


class _Kernels(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        if name in _KERNELS or (name in ("index", "index_put", "index_put_") and _has_mask(args)):
            self._names.append(name)
        return func(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
