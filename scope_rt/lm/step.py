"""One forward of a ragged batch: every sequence gets its own new tokens at its own positions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scope_rt.kv_cache.interface import KVCache
from scope_rt.lm.model_cache import ModelCache
from scope_rt.lm.model_rows import ModelRows

_KINDS = {True: "sliding_attention", False: "full_attention"}


@torch.no_grad()
def next_logits(
    model: Any, rows: ModelRows, cache: KVCache, tokens: Sequence[Sequence[int]]
) -> Tensor:
    """Feed `tokens[b]` to sequence b and return the logits after its last one, `[B, vocabulary]`.

    The cache must append behind what it holds (contiguous and paged do). A sequence that gets no
    token has a row of logits that means nothing.

    Raises:
        CacheError: there is no room; nothing was changed.
    """
    counts = [len(own) for own in tokens]
    cache.extend(counts)
    longest, device = max(counts), model.device
    padded = [[*own, *[0] * (longest - len(own))] for own in tokens]
    starts = torch.tensor(cache.lengths, device=device)
    queries_BT = starts[:, None] + torch.arange(longest, device=device)
    masks: dict[str, Tensor] = {}
    for layer, window in zip(rows.layers.attention_layers, rows.windows, strict=True):
        kind = _KINDS[window is not None]
        if kind not in masks:
            keys_BK = _keys_after(cache, layer, torch.tensor(counts, device=device))
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


def _keys_after(cache: KVCache, layer: int, counts_B: Tensor) -> Tensor:
    """Positions of the rows that the layer will show once the open span is appended, `[B, K]`."""
    old_BK = cache.positions(layer)
    held_B = (old_BK >= 0).sum(1)
    row_K = torch.arange(int((held_B + counts_B).max()), device=old_BK.device)
    starts_B = torch.tensor(cache.lengths, device=old_BK.device)
    new_BK = (starts_B - held_B)[:, None] + row_K
    keys_BK = new_BK.where(row_K < (held_B + counts_B)[:, None], -1)
    common = min(old_BK.shape[1], keys_BK.shape[1])
    is_old = row_K[:common] < held_B[:, None]
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
