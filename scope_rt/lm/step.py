"""One forward of a ragged batch: every sequence gets its own new tokens at its own positions."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from scope_contracts.errors import UnsupportedError
from scope_rt.lm.cache.backend_policy import check_dense_bound
from scope_rt.lm.cache.interface import KVCache
from scope_rt.lm.model_cache import ModelCache
from scope_rt.lm.model_rows import ModelRows

_KINDS = {True: "sliding_attention", False: "full_attention"}


class AppendingCache(KVCache, Protocol):
    """A cache that shows new rows behind those it holds, as contiguous and paged ones do."""

    def rows_held(self, layer: int) -> tuple[int, ...]:
        """Rows of every sequence without the open span, and without asking the device."""
        ...

    def hold_same_positions(self, layers: Sequence[int]) -> bool:
        """Whether these layers, which hold equally many rows, hold those of the same positions.

        The device is asked only if rows were evicted from one of them.
        """
        ...


@torch.no_grad()
def next_logits(
    model: Any, rows: ModelRows, cache: AppendingCache, tokens: Sequence[Sequence[int]]
) -> Tensor:
    """Feed `tokens[b]` to sequence b and return the logits after its last one, `[B, vocabulary]`.

    A sequence that gets no token has a row of logits that means nothing.

    Raises:
        CacheError: there is no room, in the cache or for the scores of dense attention; nothing
            was changed.
        UnsupportedError: layers of one kind keep rows that need masks of their own; nothing was
            changed.
    """
    _check_masks(rows, cache)
    counts = [len(own) for own in tokens]
    longest, device = max(counts, default=0), model.device
    check_dense_bound(
        batch=len(counts),
        heads=model.config.num_attention_heads,
        queries=longest,
        num_rows=max(max(cache.rows_held(layer)) for layer in rows.layers.attention_layers)
        + longest,
    )
    cache.extend(counts)
    padded = [[*own, *[0] * (longest - len(own))] for own in tokens]
    starts = torch.tensor(cache.lengths, device=device)
    queries_BT = starts[:, None] + torch.arange(longest, device=device)
    masks: dict[str, Tensor] = {}
    for layer, window in zip(rows.layers.attention_layers, rows.windows, strict=True):
        kind = _KINDS[window is not None]
        if kind not in masks:
            keys_BK = _keys_after(cache, layer, counts)
            masks[kind] = _mask(queries_BT, keys_BK, window, model.dtype)
    hidden = model.base_model(
        input_ids=torch.tensor(padded, device=device),
        position_ids=queries_BT,
        attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
        past_key_values=ModelCache(cache, num_layers=rows.layers.num_layers),
        use_cache=True,
    ).last_hidden_state
    cache.advance()
    last = torch.tensor(counts, device=device).clamp(min=1) - 1
    logits: Tensor = model.get_output_embeddings()(hidden[torch.arange(len(counts)), last])
    return logits


def _check_masks(rows: ModelRows, cache: AppendingCache) -> None:
    """Refuse layers of one kind that see different rows: transformers takes one mask for a kind.

    Layers that see everything may hold other positions: every row lies before every query.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in zip(rows.layers.attention_layers, rows.windows, strict=True):
        kinds.setdefault(window, []).append(layer)
    for window, layers in kinds.items():
        held = {layer: cache.rows_held(layer) for layer in layers}
        other = next((layer for layer in layers if held[layer] != held[layers[0]]), None)
        if other is not None:
            what = f"layers {layers[0]} and {other} hold {held[layers[0]]} and {held[other]} rows"
        elif window is not None and not cache.hold_same_positions(layers):
            what = f"layers {layers}, which see {window} tokens, hold rows of different positions"
        else:
            continue
        raise UnsupportedError(
            f"{what}, and one mask serves all layers of a kind; keep as many rows in each of them, "
            "at the same positions where a window counts, or evict with install_kv_eviction"
        )


def _keys_after(cache: AppendingCache, layer: int, counts: Sequence[int]) -> Tensor:
    """Positions of the rows that the layer will show once the open span is appended, `[B, K]`."""
    old_BK, held = cache.positions(layer), cache.rows_held(layer)
    shown = [rows + new for rows, new in zip(held, counts, strict=True)]
    table = torch.tensor([held, shown, cache.lengths], device=old_BK.device)
    held_B1, shown_B1, starts_B1 = table[..., None]
    row_K = torch.arange(max(shown), device=old_BK.device)
    keys_BK: Tensor = (starts_B1 - held_B1 + row_K).where(row_K < shown_B1, -1)
    common = min(old_BK.shape[1], keys_BK.shape[1])
    is_old = row_K[:common] < held_B1
    keys_BK[:, :common] = old_BK[:, :common].where(is_old, keys_BK[:, :common])
    return keys_BK


def _mask(queries_BT: Tensor, keys_BK: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores, `[B, 1, T, K]`: 0 where a query sees a key."""
    behind = queries_BT[:, :, None] - keys_BK[:, None]
    seen = (behind >= 0) & (keys_BK >= 0)[:, None]
    if window is not None:
        seen &= behind < window
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
