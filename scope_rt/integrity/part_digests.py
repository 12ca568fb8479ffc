"""What a codec or a text encoder holds has the digests it had when it was loaded.

A part of the user's own that is no `torch.nn.Module`, and holds none as an attribute, has none.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from scope_contracts.weights import Checksums
from scope_rt.memory_digest import memory_digest


class PartDigests:
    """Parameters and buffers of parts, by the part's name and their own, as they are now.

    Read where they are used, so that a tensor that was replaced counts as changed too.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self._places = {
            f"{prefix}.{name}": (module, name.rpartition("."))
            for part_name, part in parts.items()
            for prefix, module in _modules(part_name, part)
            for name in (*dict(module.named_parameters()), *dict(module.named_buffers()))
        }
        self.noted: Checksums = {name: self.now(name) for name in self._places}

    def now(self, name: str) -> int:
        """The digest of a tensor's bits, each at its place in memory."""
        tensor = self._tensor(name)
        if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
            tensor = tensor.permute(0, 2, 3, 1)  # its order in memory: nothing is copied
        return memory_digest(tensor)

    def num_bytes(self, name: str) -> int:
        """What `now` reads."""
        return self._tensor(name).nbytes

    def _tensor(self, name: str) -> Tensor:
        module, (owner, _, attribute) = self._places[name]
        tensor: Tensor = getattr(module.get_submodule(owner), attribute)
        return tensor


def _modules(name: str, part: object) -> Iterator[tuple[str, nn.Module]]:
    """The part itself, or those that it holds as attributes."""
    if isinstance(part, nn.Module):
        yield name, part
        return
    for attribute, value in getattr(part, "__dict__", {}).items():
        if isinstance(value, nn.Module):
            yield f"{name}.{attribute}", value
