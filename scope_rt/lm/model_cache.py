"""transformers' models read and write our caches: the cache they are handed is one of ours.

`ModelCache` passes rows through inside a span that the caller opened and closes. `GenerateCache`
opens and closes spans itself, as `generate()` does not know them, and translates `generate()`'s
columns, which are the same for all sequences and hold padding, into rows, which are tokens only.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from scope_contracts.errors import CacheError, UnsupportedError, UserInputError
from scope_rt.lm.cache.interface import KVCache
from scope_rt.lm.cache.paged import PagedCache


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """One layer of `owner`; it holds nothing itself."""

    def __init__(self, owner: "ModelCache", index: int) -> None:
        super().__init__()
        self._owner, self._index = owner, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Memory was allocated before."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        first, second = self._owner.exchange(
            self._index, key_states.transpose(1, 2), value_states.transpose(1, 2)
        )
        return first.transpose(1, 2), second.transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.num_columns + query_length, 0

    def get_seq_length(self) -> int:
        return self._owner.num_columns

    def get_max_length(self) -> int:
        return -1


class ModelCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """`cache` as a model of `num_layers` layers takes it, within a span that is open."""

    def __init__(self, cache: KVCache, *, num_layers: int) -> None:
        super().__init__(layers=[_Layer(self, index) for index in range(num_layers)])
        self.cache = cache

    @property
    def num_columns(self) -> int:
        """Tokens of the longest sequence, without the open span."""
        return max(self.cache.lengths)

    def exchange(self, layer: int, *planes_BTHD: Tensor) -> tuple[Tensor, ...]:
        """Write the span's rows of a layer and read all of them."""
        self.cache.append(layer, *planes_BTHD)
        return self.cache.view(layer)

    def reset(self) -> None:
        self.cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        self._refuse("beam search moves rows between sequences")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        self._refuse("the batch is fixed when the cache is made")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        self._refuse("the batch is fixed when the cache is made")

    def crop(self, tokens_to_remove: int) -> None:
        self._refuse("sequences end at different lengths; call truncate on the cache")

    def _refuse(self, reason: str) -> NoReturn:
        raise UnsupportedError(f"{reason}; use greedy search or sampling, or a DynamicCache")


class GenerateCache(ModelCache):
    """For `model.generate(input_ids, attention_mask=..., past_key_values=...)`.

    Args:
        attention_mask: `[B, columns]` of the prompt, as `generate` gets it: padding is not stored.
        num_cached_columns: columns of the prompt whose tokens the cache holds already.

    Raises:
        UserInputError: the mask is of another batch, or the cache holds other tokens than those.
        UnsupportedError: rows left the cache, or will: `generate()` expects one for every column.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        num_layers: int,
        attention_mask: Tensor,
        num_cached_columns: int = 0,
    ) -> None:
        real_BC = attention_mask.bool()
        counts = tuple(real_BC[:, :num_cached_columns].sum(1).tolist())
        if counts != cache.lengths:
            raise UserInputError(
                f"the cache holds {cache.lengths} tokens, the first {num_cached_columns} columns "
                f"of the prompt have {counts}; reset it, or say how many columns it holds"
            )
        _check_rows(cache, num_layers)
        super().__init__(cache, num_layers=num_layers)
        self._real_BC = real_BC
        self._num_columns = self._end_column = num_cached_columns
        self._sources: Tensor | None = None
        self._rows_BC: Tensor | None = None

    @property
    def num_columns(self) -> int:
        return self._num_columns

    def exchange(self, layer: int, *planes_BTHD: Tensor) -> tuple[Tensor, ...]:
        if layer == 0:
            self._open(planes_BTHD[0].shape[1])
        if self._sources is not None:
            planes_BTHD = tuple(_pick(plane, self._sources) for plane in planes_BTHD)
        shown = super().exchange(layer, *planes_BTHD)
        if self._rows_BC is not None:
            shown = tuple(_spread(plane, self._rows_BC) for plane in shown)
        if layer == len(self.layers) - 1:
            self.cache.advance()
            self._num_columns = self._end_column
        return shown

    def reset(self) -> NoReturn:
        raise CacheError("a prompt's padding is fixed; reset the cache and make a GenerateCache")

    def _open(self, num_new: int) -> None:
        """Open the span of `num_new` columns; behind the prompt every column is a token.

        A prompt may come in pieces, and a piece that failed again.
        """
        known = self._real_BC.shape[1]
        end = self._end_column = self._num_columns + num_new
        if end > known:
            more = self._real_BC.new_ones((self._real_BC.shape[0], end - known))
            self._real_BC = torch.cat([self._real_BC, more], 1)
        real_BC = self._real_BC[:, :end]
        new_BT = real_BC[:, self._num_columns :]
        counts: Sequence[int] = new_BT.sum(1).tolist()
        self.cache.extend(counts)
        self._sources = self._rows_BC = None
        if not new_BT.all():
            self._sources = (~new_BT).int().argsort(dim=1, stable=True)[:, : max(counts)]
        if not real_BC.all():
            self._rows_BC = (real_BC.cumsum(1) - 1).where(real_BC, -1)


def _check_rows(cache: KVCache, num_layers: int) -> None:
    """Refuse a cache that does not hold every row of its sequences for as long as they last."""
    if isinstance(cache, PagedCache) and any(group.window for group in cache.store.groups):
        reason = "the cache drops the rows that leave a window"
    elif any(
        (cache.positions(layer) >= 0).sum(1).tolist() != list(cache.lengths)
        for layer in range(num_layers)
    ):
        reason = f"rows were evicted from a cache of {cache.lengths} tokens"
    else:
        return
    raise UnsupportedError(
        f"{reason}, and generate() expects one for every column; use next_logits, or a cache "
        "without windows and eviction"
    )


def _pick(plane_BTHD: Tensor, sources_BN: Tensor) -> Tensor:
    """Rows by index along T."""
    index = sources_BN[..., None, None].expand(-1, -1, *plane_BTHD.shape[2:])
    return plane_BTHD.gather(1, index)


def _spread(plane_BKHD: Tensor, rows_BC: Tensor) -> Tensor:
    """Every column's row; zeros where the column is padding, as all may be so far."""
    if not plane_BKHD.shape[1]:
        return plane_BKHD.new_zeros((*rows_BC.shape, *plane_BKHD.shape[2:]))
    picked = _pick(plane_BKHD, rows_BC.clamp(min=0))
    return picked.masked_fill_((rows_BC < 0)[..., None, None], 0)
