"""Tensors that are held for long, each known by the digest it had when it was noted.

They are read where they are used, so that one that was replaced counts as changed too. First it is
seen where each lies, then all are digested in a loop of nothing else: that takes half the time.
"""

from collections.abc import Callable, Collection, Iterable, KeysView
from ctypes import Array, c_char
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from xxhash import xxh3_64_intdigest

from scope_rt.memory_digest import kind_of, memory_digest

Reader = Callable[[], Tensor]
"""Gives the tensor that is in use now."""


@dataclass(slots=True)
class _Held:
    reader: Reader
    noted: int = 0
    memory: Array[c_char] | None = None
    """Its numbers, one after another in the CPU's memory; None where they do not lie so."""
    kind: int = 0
    _layout: tuple[object, ...] = ()

    def find(self) -> Tensor:
        """See where it lies. What is returned must outlive the look at its memory."""
        tensor = self.reader()
        layout = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if layout != self._layout:
            self._layout, ordered = layout, _in_memory_order(tensor)
            self.memory, self.kind = None, kind_of(ordered)
            if tensor.device.type == "cpu" and ordered.is_contiguous():
                self.memory = (c_char * tensor.nbytes).from_address(tensor.data_ptr())
        return tensor


class TensorDigests:
    """Tensors by name, in the order in which they were noted."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def names(self) -> KeysView[str]:
        return self._held.keys()

    def note(self, name: str, reader: Reader) -> None:
        """What `reader` gives is right as it is now. Blocks until it is read."""
        held = self._held[name] = _Held(reader)
        [held.noted] = _digests([held])

    def num_bytes(self, name: str) -> int:
        """What `changed` reads of it."""
        return self._held[name].reader().nbytes

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those that are not what they were. Blocks until all are read."""
        held = {name: self._held[name] for name in names}
        now = _digests(held.values())
        return [
            name for (name, each), got in zip(held.items(), now, strict=True) if got != each.noted
        ]


class NoDigests(TensorDigests):
    """Of a stream that verifies nothing: no tensor is read for it, so no device is waited for."""

    def note(self, name: str, reader: Reader) -> None: ...


def reader_of(module: nn.Module, name: str) -> Reader:
    """Of a parameter or buffer by its name in `module`, as `getattr` finds it, in half the time."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    own = vars(owner)
    held = own["_parameters" if attribute in own["_parameters"] else "_buffers"]

    def read() -> Tensor:
        tensor: Tensor | None = None if attribute in own else held.get(attribute)
        return getattr(owner, attribute) if tensor is None else tensor

    return read


def _digests(held: Collection[_Held]) -> list[int]:
    found = [each.find() for each in held]
    memories = [each.memory for each in held if each.memory is not None]
    if len(memories) == len(held):
        return [*map(xxh3_64_intdigest, memories, [each.kind for each in held])]
    return [memory_digest(_in_memory_order(tensor)) for tensor in found]


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Its axes in the order in which its numbers lie, where that is known: nothing is copied."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1)
    return tensor
