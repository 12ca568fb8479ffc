"""How many bytes lived at once is counted as tensors come and go; not a test itself."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storage_of(tensor: Tensor) -> Any:
    """Tells whether it is still alive, and keeps nothing alive."""
    return StorageWeakRef(tensor.untyped_storage())


class LiveBytes(TorchDispatchMode):
    """The most bytes that lived at once beyond those of `known`, while it was entered."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[Any, int]] = {}
        for tensor in known:
            self._see(tensor)
        self._before, self.peak = self._num_bytes(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            self._see(tensor)
        self.peak = max(self.peak, self._num_bytes() - self._before)
        return result

    def _see(self, tensor: Tensor) -> None:
        ref = _storage_of(tensor)
        self._live[ref.cdata] = (ref, tensor.untyped_storage().nbytes())

    def _num_bytes(self) -> int:
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        return sum(num_bytes for _, num_bytes in self._live.values())
