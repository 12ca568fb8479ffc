"""A policy under kvpress chooses the rows it would choose here; kvpress brings hooks and caches.

kvpress is an optional peer that pins an older transformers: `scripts/kvpress_env` builds an
environment with both. Positions are kvpress's own affair; it takes sequences without padding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from kvpress import DecodingPress, PrefillDecodingPress, ScorerPress
from kvpress.presses.base_press import is_prefilling
from kvpress.utils import compute_n_kept
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.kv_cache.policy import EvictionPolicy


@dataclass
class PolicyPress(ScorerPress):  # type: ignore[misc]  # kvpress is not followed
    """Prefill: the policy's best rows stay, in the order of the sequence.

    With `compression_ratio` 0, `policy.capacity` rows stay. Another ratio, as kvpress's wrappers
    set it, says how many; the policy still says which.
    """

    policy: EvictionPolicy = field(kw_only=True)
    per_head: bool = False
    """Every K/V head keeps rows of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._mass: dict[int, Tensor] = {}

    def score(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: Any,
    ) -> Tensor:
        """`[B, K/V heads, K]`: K for the row to keep first, down to 1; comparable within a head.

        Raises:
            UserInputError: the policy needs attention probabilities, and there are none.
        """
        batch, heads, num_rows, _ = keys.shape
        mass = torch.zeros((batch, 1, num_rows), device=keys.device)
        if self.policy.needs_scores:
            tracked = self._mass.get(module.layer_idx)
            mass = self._paid(attentions, module) if tracked is None else tracked
        ranked = self.policy.ranked(mass).expand(batch, heads, num_rows)
        ranks = torch.arange(num_rows, 0, -1, device=keys.device).expand(ranked.shape)
        return torch.empty_like(keys[..., 0], dtype=torch.float32).scatter_(
            -1, ranked, ranks.to(torch.float32)
        )

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        num_rows = keys.shape[2]
        num_kept = self.policy.capacity
        if self.compression_ratio:
            num_kept = compute_n_kept(num_rows, self.compression_ratio)
        if num_rows <= num_kept:
            return keys, values
        score = self.score(module, hidden_states, keys, values, attentions, kwargs)
        index = score.topk(num_kept, dim=-1).indices.sort(dim=-1).values
        mass = self._mass.get(module.layer_idx)
        if mass is not None:
            self._mass[module.layer_idx] = mass.gather(-1, index[:, : mass.shape[1]])
        rows = index[..., None]
        return keys.take_along_dim(rows, dim=2), values.take_along_dim(rows, dim=2)

    def observe(self, module: Any, attentions: Tensor | None, kwargs: dict[str, Any]) -> None:
        """Add a forward's attention to what this layer's rows were paid since the prefill."""
        if not self.policy.needs_scores:
            return
        paid = self._paid(attentions, module)
        past = self._mass.get(module.layer_idx)
        if past is not None and not _is_prefill(kwargs):
            paid[..., : past.shape[-1]] += past
        self._mass[module.layer_idx] = paid

    def forward_hook(self, module: Any, input: Any, kwargs: dict[str, Any], output: Any) -> Any:  # noqa: A002
        if _is_prefill(kwargs):
            self.observe(module, output[1], kwargs)
        return super().forward_hook(module, input, kwargs, output)

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        try:
            with super().__call__(model):
                yield
        finally:
            self.forget()

    def forget(self) -> None:
        """Start over, as for a new sequence."""
        self._mass.clear()

    def _paid(self, attentions: Tensor | None, module: Any) -> Tensor:
        """What one forward paid: `[B, K/V heads or 1, K]`."""
        if attentions is None:
            raise UserInputError(
                "this policy ranks by attention, and the model returned no probabilities; load it "
                'with attn_implementation="eager"'
            )
        groups = module.config.num_key_value_heads if self.per_head else 1
        by_group: Tensor = attentions.unflatten(1, (groups, -1))
        return by_group.sum(dim=(2, 3), dtype=torch.float32)


def _is_prefill(kwargs: dict[str, Any]) -> bool:
    return bool(is_prefilling(kwargs["cache_position"], kwargs["hidden_states"].shape[1]))


@dataclass
class PolicyDecodingPress(DecodingPress):  # type: ignore[misc]
    """Decoding: attention adds up from the prefill on, in every step, compressing or not.

    A plain `DecodingPress(PolicyPress(...))` works too, and ranks by the last step alone.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.base_press, PolicyPress):
            raise UserInputError(
                f"base_press: got {type(self.base_press).__name__}, want PolicyPress; for others "
                "use DecodingPress"
            )

    def forward_hook(self, module: Any, input: Any, kwargs: dict[str, Any], output: Any) -> Any:  # noqa: A002
        self.base_press.observe(module, output[1], kwargs)
        return super().forward_hook(module, input, kwargs, output)

    def reset(self) -> None:
        super().reset()
        self.base_press.forget()


def decoding_press(policy: EvictionPolicy, *, per_head: bool = False) -> PolicyDecodingPress:
    """Evicts in decoding alone: to the policy's capacity, as often as the policy says."""
    return _decoding(PolicyPress(policy=policy, per_head=per_head))


def eviction_press(policy: EvictionPolicy, *, per_head: bool = False) -> PrefillDecodingPress:
    """Evicts after the prefill and in decoding: what `install_kv_eviction` does."""
    base = PolicyPress(policy=policy, per_head=per_head)
    return PrefillDecodingPress(prefilling_press=base, decoding_press=_decoding(base))


def _decoding(base: PolicyPress) -> PolicyDecodingPress:
    return PolicyDecodingPress(
        base_press=base,
        compression_interval=base.policy.peak - base.policy.capacity + 1,
        target_size=base.policy.capacity,
        hidden_states_buffer_size=1,
    )
