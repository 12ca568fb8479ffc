"""One layer's cache whose rows leave while positions stay: it counts tokens seen, not rows left.

Every row remembers its column, the place its token has in the sequence that was fed. transformers
asks `get_seq_length` for the next position and for the size of the mask, so both stay those of the
full cache; the mask is then narrowed to the columns that this layer still holds. Policy and codec
are the same objects that every other cache composes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from scope_contracts.errors import CacheError, UnsupportedError
from scope_rt.collectives import Collectives
from scope_rt.kv_cache.codec import Codec
from scope_rt.kv_cache.policy import EvictionPolicy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvictionSettings:
    """What all layers of one installation share; a copied cache shares it as well."""

    policy: EvictionPolicy
    per_head: bool
    """Whether every K/V head keeps rows of its own."""
    codec: Codec
    """How the numbers of a row are stored."""
    collectives: Collectives

    def __deepcopy__(self, memo: dict[int, object]) -> "EvictionSettings":
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """All rows of a layer; G is 1, or the K/V heads if each chooses its own."""

    columns: Tensor
    """int64 `[B, G, K]`"""
    is_real: Tensor
    """bool `[B, G, K]`; padding is not."""
    mass: Tensor
    """Attention that all queries so far paid to it, summed over the heads of G on this rank."""
    keys: tuple[Tensor, ...]
    """The codec's parts, each `[B, heads, K, width]`; values likewise."""
    values: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        known = (self.columns, self.is_real, self.mass)
        return sum(tensor.nbytes for tensor in (*known, *self.keys, *self.values))

    def joined(self, newer: "Rows") -> "Rows":
        return Rows(
            columns=torch.cat([self.columns, newer.columns], dim=-1),
            is_real=torch.cat([self.is_real, newer.is_real], dim=-1),
            mass=torch.cat([self.mass, newer.mass], dim=-1),
            keys=_each(lambda *parts: torch.cat(parts, dim=2), self.keys, newer.keys),
            values=_each(lambda *parts: torch.cat(parts, dim=2), self.values, newer.values),
        )

    def at(self, index: Tensor) -> "Rows":
        """The rows of `index [B, G, K']`."""
        of_heads = index[..., None]
        return Rows(
            columns=self.columns.gather(-1, index),
            is_real=self.is_real.gather(-1, index),
            mass=self.mass.gather(-1, index),
            keys=_each(lambda part: part.take_along_dim(of_heads, dim=2), self.keys),
            values=_each(lambda part: part.take_along_dim(of_heads, dim=2), self.values),
        )

    def batch(self, index: Tensor) -> "Rows":
        """The sequences of `index [B']`, as integers or as flags."""
        return Rows(
            columns=self.columns[index],
            is_real=self.is_real[index],
            mass=self.mass[index],
            keys=_each(lambda part: part[index], self.keys),
            values=_each(lambda part: part[index], self.values),
        )


def _each(change: Callable[..., Tensor], *planes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`change` of every part."""
    return tuple(change(*parts) for parts in zip(*planes, strict=True))


class EvictingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not followed
    """A `DynamicLayer` between `announce`, before its attention runs, and `observe`, after it.

    keys, values: `[B, heads, K, dim]` as the model caches them, decoded when asked for. For
    DeepseekV3 these are the latent and the RoPE key, one head each and of unequal dim.
    """

    is_croppable = False

    def __init__(self, settings: EvictionSettings) -> None:
        # Not the base's, which would set `keys` and `values`: here they follow from the rows.
        self.settings = settings
        self._forget()

    def _forget(self) -> None:
        self.is_initialized = False
        self.num_seen = 0
        """Tokens fed, padding included: the next column."""
        self.num_steps = 0
        """One-token steps since the last longer one."""
        self.rows: Rows | None = None
        self._announced: Rows | None = None

    # What transformers calls.

    @property
    def keys(self) -> Tensor:
        return self._decoded(self._held().keys)

    @property
    def values(self) -> Tensor:
        return self._decoded(self._held().values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take the announced tokens' rows; return all rows as every later step will see them."""
        if self._announced is None:
            raise CacheError(
                "this cache was filled under install_kv_eviction, which its model no longer has; "
                "start with a new cache, or install again"
            )
        self.lazy_initialization(key_states, value_states)
        encode = self.settings.codec.encode
        new = replace(self._announced, keys=encode(key_states), values=encode(value_states))
        self.rows = new if self.rows is None else self.rows.joined(new)
        self._announced = None
        num_new = key_states.shape[-2]
        self.num_seen += num_new
        self.num_steps = self.num_steps + 1 if num_new == 1 else 0
        return self.keys, self.values

    def get_seq_length(self) -> int:  # which the size of the mask follows from, too
        return self.num_seen

    def reset(self) -> None:
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UnsupportedError(
                "a cache that evicts cannot give back what it evicted, so it cannot be cropped; "
                "decode without an assistant model, or call remove_kv_eviction first"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.rows is not None:
            self.batch_select_indices(torch.arange(len(self.rows.mass)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.rows is not None:
            self.rows = self.rows.batch(indices.to(self.rows.columns.device))

    def _held(self) -> Rows:
        if self.rows is None:
            raise CacheError("no row was cached yet; feed tokens first")
        return self.rows

    def _decoded(self, parts: tuple[Tensor, ...]) -> Tensor:
        return self.settings.codec.decode(parts, self.dtype)

    # What the taps around the layer's attention call.

    @property
    def num_rows(self) -> int:
        return 0 if self.rows is None else self.rows.columns.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Of keys and values as they are stored, and of what is known of every row."""
        return 0 if self.rows is None else self.rows.num_bytes

    @property
    def positions(self) -> Tensor:
        """Column of every row, `[B, G, K]`; -1 marks padding. Empty before the first token."""
        if self.rows is None:
            return torch.empty((0, 0, 0), dtype=torch.int64)
        return torch.where(self.rows.is_real, self.rows.columns, -1)

    def announce(
        self, hidden_BTC: Tensor, mask: Tensor | None, *, cached_heads: int, group_size: int
    ) -> Tensor | None:
        """Take note of T new tokens; return the mask narrowed to the rows this layer holds.

        `mask` is additive, `[B or 1, 1 or query heads, T, num_seen + T]`; `group_size` query heads
        share a cached one. While nothing was evicted the mask comes back as it is.

        Raises:
            CacheError: the mask has another width; nothing was changed.
        """
        (batch, num_new), device = hidden_BTC.shape[:2], hidden_BTC.device
        num_columns = self.num_seen + num_new
        if mask is not None and mask.shape[-1] != num_columns:
            raise CacheError(
                f"attention_mask: got {mask.shape[-1]} columns, want {num_columns}: one for every "
                "token since the start, evicted ones too; lengthen the mask"
            )
        shape = (batch, cached_heads if self.settings.per_head else 1, num_new)
        real = torch.ones(shape, dtype=torch.bool, device=device)
        if mask is not None:  # a token that may not see itself is padding
            own = mask[:, :1, :, self.num_seen :].diagonal(dim1=-2, dim2=-1)
            real = (own > torch.finfo(mask.dtype).min / 2).expand(shape)
        mass_dtype = torch.promote_types(hidden_BTC.dtype, torch.float32)
        new = Rows(
            columns=torch.arange(self.num_seen, num_columns, device=device).expand(shape),
            is_real=real,
            mass=torch.zeros(shape, dtype=mass_dtype, device=device),
            keys=(),
            values=(),
        )
        self._announced = new
        if mask is None or self.rows is None or self.num_rows == self.num_seen:
            return mask
        columns = torch.cat([self.rows.columns, new.columns], dim=-1)
        if self.settings.per_head:
            columns = columns.repeat_interleave(group_size, dim=1)
        return mask.take_along_dim(columns[:, :, None, :], dim=-1)

    def observe(self, weights_BHTK: Tensor) -> None:
        """Add up what the T newest tokens paid to every row, then evict if it is time.

        With `collectives`, every eviction costs one sum over the ranks, unless heads choose alone.
        """
        rows = self.rows
        if rows is None:
            raise CacheError("attention ran without its cache; pass past_key_values")
        is_query = rows.is_real[:, :1, -weights_BHTK.shape[2] :]
        # What padding attends to is nothing.
        weights_BHTK = weights_BHTK.detach().masked_fill(~is_query[..., None], 0)
        by_group = weights_BHTK.unflatten(1, (rows.mass.shape[1], -1))
        paid = by_group.sum(dim=(2, 3), dtype=rows.mass.dtype)
        self.rows = replace(rows, mass=rows.mass + paid)
        policy = self.settings.policy
        if self.num_rows > policy.capacity and policy.due(self.num_steps):
            self._evict(self.rows)

    def _evict(self, rows: Rows) -> None:
        score = rows.mass
        collectives = self.settings.collectives
        if not self.settings.per_head and collectives.size > 1:
            score = collectives.all_reduce_sum(score.clone())
        self.rows = rows.at(self.settings.policy.kept(score, self.positions))
