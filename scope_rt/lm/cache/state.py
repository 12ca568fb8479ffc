"""A recurrent layer's state replaces itself, so it can be copied and put back but not cut shorter.

It answers the calls of `interface.KVCache` that make sense for it. There are no rows: `append` and
`view` are `update` and `state`, and nothing can be evicted or truncated; `fork` before what may
have to be undone. A span's states become the cache's at `advance`, so a span can be computed again;
until then they lie beside the old ones and take as many bytes.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from scope_contracts.errors import CacheError, UnsupportedError
from scope_rt.kv_cache.counters import CacheCounters
from scope_rt.kv_cache.row_digest import state_digest
from scope_rt.kv_cache.span import SpanState
from scope_rt.lm.specs.state_format import StateFormat
from scope_rt.tensors import TORCH_DTYPES

_States = dict[int, tuple[Tensor, ...]]
"""By layer, then part."""


class StateCache:
    """`[batch, *shape]` of every part, for each layer in `layers` (the model's own numbers).

    `format` is this rank's share.
    """

    def __init__(
        self,
        state_format: StateFormat,
        *,
        layers: Sequence[int],
        batch: int,
        device: torch.device,
    ) -> None:
        self.format, self.layers, self.batch = state_format, tuple(layers), batch
        self.counters = CacheCounters()
        self._device = device
        dtype = TORCH_DTYPES[state_format.dtype]
        self._parts: _States = {
            layer: tuple(
                torch.zeros((batch, *part.shape), dtype=dtype, device=device)
                for part in state_format.parts
            )
            for layer in self.layers
        }
        self._lengths = [0] * batch
        self._spans: SpanState[tuple[int, ...], tuple[list[int], _States]] = SpanState(
            "no state of this span; update them"
        )
        self._pending: _States = {}

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens that went into each sequence's state."""
        return tuple(self._lengths)

    @property
    def span(self) -> tuple[int, ...] | None:
        """Tokens of the open span, per sequence; None where none is open."""
        return self._spans.span

    @property
    def num_bytes(self) -> int:
        """Bytes of all states; a fork holds as much again until it ends, and so does a span."""
        return sum(part.nbytes for parts in self._parts.values() for part in parts)

    def extend(self, num_tokens: Sequence[int]) -> None:
        """Open the next span. There is always room; a count of 0 leaves a sequence's state alone.

        Raises:
            CacheError: the counts are not the batch's.
        """
        if len(num_tokens) != self.batch or min(num_tokens, default=0) < 0:
            raise CacheError(f"extend: got {tuple(num_tokens)}, want {self.batch} counts from 0 on")
        self._spans.open(tuple(num_tokens))
        self._pending = {}

    def state(self, layer: int) -> tuple[Tensor, ...]:
        """Every part `[batch, *shape]`, as the last `advance` left it: read, do not write."""
        self._known(layer)
        self.counters.rows_read += self.batch
        return self._parts[layer]

    def update(self, layer: int, *parts: Tensor) -> None:
        """Copy a layer's state behind the open span; again for the same layer replaces it.

        Raises:
            CacheError: no span is open, or a part is missing or of another shape.
        """
        self._known(layer)
        self._spans.opened()
        want = [tuple(part.shape) for part in self._parts[layer]]
        got = [tuple(part.shape) for part in parts]
        if got != want:
            raise CacheError(f"got a state of shapes {got}, want {want}")
        self._pending[layer] = tuple(
            part.detach().to(held.dtype, copy=True)
            for held, part in zip(self._parts[layer], parts, strict=True)
        )
        self._spans.written.add(layer)
        self.counters.rows_written += self.batch

    def advance(self) -> None:
        """Make the span's states the cache's.

        Raises:
            CacheError: no span is open, or a layer was given no state.
        """
        span = self._spans.opened()
        self._spans.check_written(self.layers)
        has_moved_B = torch.tensor(span, device=self._device) > 0
        for layer, parts in self._pending.items():
            for held, part in zip(self._parts[layer], parts, strict=True):
                has_moved = has_moved_B.view(-1, *[1] * (held.ndim - 1))
                torch.where(has_moved, part, held, out=held)  # in place: no third copy
        self._lengths = [old + new for old, new in zip(self._lengths, span, strict=True)]
        self.counters.advances += 1
        self._spans.close()
        self._pending = {}

    def fork(self) -> None:
        """Begin a speculative span: the states are copied."""
        self._spans.fork(self._copy)

    def commit(self) -> None:
        """End the speculative span and keep what it did."""
        self._spans.commit()

    def discard(self) -> None:
        """End the speculative span and be as if it had never begun."""
        self._lengths, copies = self._spans.discard()
        for layer, parts in copies.items():
            for held, part in zip(self._parts[layer], parts, strict=True):
                held.copy_(part)
        self._pending = {}

    def reset(self) -> None:
        """Forget everything: states are zeros again."""
        for parts in self._parts.values():
            for part in parts:
                part.zero_()
        self._lengths, self._pending = [0] * self.batch, {}
        self._spans.reset()

    def digest(self) -> str:
        """BLAKE2b over lengths and states, in order of layer; the open span does not count."""
        return state_digest(self.lengths, (self._parts[layer] for layer in self.layers))

    def append(self, layer: int, *planes: Tensor) -> NoReturn:
        """Raises `UnsupportedError`: a state has no rows."""
        raise UnsupportedError("a state cache has no rows to append; use update(layer, *parts)")

    def view(self, layer: int) -> NoReturn:
        """Raises `UnsupportedError`: a state has no rows."""
        raise UnsupportedError("a state cache has no rows to view; use state(layer)")

    def positions(self, layer: int) -> NoReturn:
        """Raises `UnsupportedError`: a state has no rows."""
        raise UnsupportedError("a state cache has no rows, so no positions; use lengths")

    def keep(self, layer: int, rows_BK: Tensor) -> NoReturn:
        """Raises `UnsupportedError`: what went into a state cannot be taken out of it."""
        raise UnsupportedError("a state cannot forget single tokens; fork before what may go")

    def truncate(self, lengths: Sequence[int]) -> NoReturn:
        """Raises `UnsupportedError`: what went into a state cannot be taken out of it."""
        raise UnsupportedError("a state cannot be cut shorter; fork before it and discard instead")

    def _known(self, layer: int) -> None:
        if layer not in self._parts:
            have = ", ".join(map(str, self.layers))
            raise CacheError(f"layer {layer} has no state; layers {have} do")

    def _copy(self) -> tuple[list[int], _States]:
        copies = {
            layer: tuple(part.clone() for part in parts) for layer, parts in self._parts.items()
        }
        return list(self._lengths), copies
