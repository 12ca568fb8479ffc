"""Counts where a GPU would have to be waited for, on any device; not a test itself."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Waits(TorchDispatchMode):
    """Operations after which a GPU would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "_unique2", "nonzero"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))
