"""What a codec or a text encoder holds has the digests it had when it was loaded.

A part of the user's own that is no `torch.nn.Module`, and holds none as an attribute, has none.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from scope_rt.tensor_digests import TensorDigests, reader_of


def part_digests(parts: Mapping[str, object]) -> TensorDigests:
    """Parameters and buffers of parts, by the part's name and their own."""
    digests = TensorDigests()
    for part_name, part in parts.items():
        for prefix, module in _modules(part_name, part):
            for name in (*dict(module.named_parameters()), *dict(module.named_buffers())):
                digests.note(f"{prefix}.{name}", reader_of(module, name))
    return digests


def _modules(name: str, part: object) -> Iterator[tuple[str, nn.Module]]:
    """The part itself, or those that it holds as attributes."""
    if isinstance(part, nn.Module):
        yield name, part
        return
    for attribute, value in getattr(part, "__dict__", {}).items():
        if isinstance(value, nn.Module):
            yield f"{name}.{attribute}", value
