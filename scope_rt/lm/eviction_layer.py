"""One layer's cache whose rows leave while positions stay: it counts tokens seen, not rows left.

Every row remembers its column, the place its token has in the sequence that was fed. transformers
asks `get_seq_length` for the next position and for the size of the mask, so both stay those of the
full cache; the mask is then narrowed to the columns that this layer still holds.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from scope_contracts.errors import CacheError, UnsupportedError
from scope_rt.collectives import Collectives
from scope_rt.kv_cache.policy import EvictionPolicy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvictionSettings:
    """What all layers of one installation share; a copied cache shares it as well."""

    policy: EvictionPolicy
    per_head: bool
    """Whether every K/V head keeps rows of its own."""
    collectives: Collectives

    def __deepcopy__(self, memo: dict[int, object]) -> "EvictionSettings":
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What is known of every row, `[B, G, K]`; G is 1, or the K/V heads if each chooses its own."""

    columns: Tensor
    """int64"""
    is_real: Tensor
    """bool; padding is not."""
    mass: Tensor
    """Attention that all queries so far paid to it, summed over the heads of G on this rank."""

    def joined(self, newer: "Rows") -> "Rows":
        return Rows(
            columns=torch.cat([self.columns, newer.columns], dim=-1),
            is_real=torch.cat([self.is_real, newer.is_real], dim=-1),
            mass=torch.cat([self.mass, newer.mass], dim=-1),
        )

    def at(self, index: Tensor) -> "Rows":
        """The rows of `index [B, G, K']`."""
        return Rows(
            columns=self.columns.gather(-1, index),
            is_real=self.is_real.gather(-1, index),
            mass=self.mass.gather(-1, index),
        )

    def batch(self, index: Tensor) -> "Rows":
        """The sequences of `index [B']`."""
        return Rows(columns=self.columns[index], is_real=self.is_real[index], mass=self.mass[index])


class EvictingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not followed
    """A `DynamicLayer` between `announce`, before its attention runs, and `observe`, after it.

    keys, values: `[B, heads, K, dim]` as the model caches them. For DeepseekV3 these are the latent
    and the RoPE key, one head each and of unequal dim.
    """

    is_croppable = False
    keys: Tensor
    values: Tensor

    def __init__(self, settings: EvictionSettings) -> None:
        super().__init__()
        self.settings = settings
        self._forget()

    def _forget(self) -> None:
        self.num_seen = 0
        """Tokens fed, padding included: the next column."""
        self.num_steps = 0
        """One-token steps since the last longer one."""
        self.rows: Rows | None = None
        self._announced: Rows | None = None

    # What transformers calls.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self._announced is None:
            raise CacheError(
                "this cache was filled under install_kv_eviction, which its model no longer has; "
                "start with a new cache, or install again"
            )
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.rows = self._announced if self.rows is None else self.rows.joined(self._announced)
        self._announced = None
        num_new = key_states.shape[-2]
        self.num_seen += num_new
        self.num_steps = self.num_steps + 1 if num_new == 1 else 0
        return keys, values

    def get_seq_length(self) -> int:  # which the size of the mask follows from, too
        return self.num_seen

    def reset(self) -> None:
        super().reset()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UnsupportedError(
                "a cache that evicts cannot give back what it evicted, so it cannot be cropped; "
                "decode without an assistant model, or call remove_kv_eviction first"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.rows is not None:
            batch = torch.arange(self.rows.columns.shape[0], device=self.rows.columns.device)
            self._select(batch.repeat_interleave(repeats))

    def _select(self, batch: Tensor) -> None:
        if self.rows is not None:
            self.rows = self.rows.batch(batch.to(self.rows.columns.device))

    # What the taps around the layer's attention call.

    @property
    def num_rows(self) -> int:
        return 0 if self.rows is None else self.rows.columns.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Of keys and values, and of what is known of every row."""
        if self.rows is None:
            return 0
        held = (self.rows.columns, self.rows.is_real, self.rows.mass, self.keys, self.values)
        return sum(tensor.nbytes for tensor in held)

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
        )
        self._announced = new
        if mask is None or self.num_rows == self.num_seen:
            return mask
        columns = new.columns if self.rows is None else self.rows.joined(new).columns
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
        index = self.settings.policy.kept(score, self.positions)
        self.keys = self.keys.take_along_dim(index[..., None], dim=2)
        self.values = self.values.take_along_dim(index[..., None], dim=2)
        self.rows = rows.at(index)

    def forget_mass(self) -> None:
        """Every row starts at a score of 0 again; the rows stay."""
        if self.rows is not None:
            self.rows = replace(self.rows, mass=torch.zeros_like(self.rows.mass))
