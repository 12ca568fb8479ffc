"""A ragged batch of 8 with shared prefixes, on blocks and in one piece; not a test itself."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scope_contracts.row_format import CodecKind
from scope_rt.lm.cache.block_key import SharingScope
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import PagedStore
from scope_rt.lm.model_rows import ModelRows, model_rows
from scope_rt.lm.step import AppendingCache, next_logits
from tests.lm.eviction_models import tiny_lm
from tests.tiny_models import CPU

BLOCK, BATCH = 4, 8
SCOPE = SharingScope(domain="cpp")
PREFIXES = [list(range(1, 14)), list(range(20, 29))]  # 13 and 9 tokens: 3 and 2 whole blocks
PROMPTS = [
    [*PREFIXES[index % 2], *((7 * index + step) % 40 + 1 for step in range(1 + index))]
    for index in range(BATCH)
]
REUSED = [12 if index % 2 == 0 else 8 for index in range(BATCH)]


def store_of(rows: ModelRows, *, num_blocks: int, max_tokens: int | None = None) -> PagedStore:
    """Blocks for what the layers of one model keep."""
    return PagedStore(
        rows.row_format,
        layers=rows.layers,
        num_blocks=num_blocks,
        block_size=BLOCK,
        device=CPU,
        windows=rows.windows,
        max_tokens=max_tokens,
    )


@dataclass(frozen=True)
class Bench:
    """A tiny model and what its caches hold."""

    model: Any
    rows: ModelRows

    def store(self, num_blocks: int = 80) -> PagedStore:
        return store_of(self.rows, num_blocks=num_blocks)

    def contiguous(self, batch: int, max_tokens: int = 64) -> ContiguousCache:
        return ContiguousCache(
            self.rows.row_format,
            layers=self.rows.layers,
            batch=batch,
            max_tokens=max_tokens,
            device=CPU,
        )

    def feed(self, cache: AppendingCache, tokens: list[list[int]]) -> Tensor:
        return next_logits(self.model, self.rows, cache, tokens)

    def generate(
        self, cache: Any, ids: Tensor, mask: Tensor, *, new: int, piece: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sequences, and the logits of all steps; the prompt is fed `piece` columns at a time."""
        out = self.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            prefill_chunk_size=piece,
        )
        return out.sequences, torch.stack(out.logits)


def bench(
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    codec: CodecKind = CodecKind.IDENTITY,
    **changes: Any,
) -> Bench:
    model = tiny_lm(kind, attention=attention, dtype=dtype, **changes)
    return Bench(model, model_rows(model, codec=codec))


def padded(prompts: list[list[int]], *, prefix: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask as `generate` takes them, padding behind the first `prefix` columns."""
    width = max(map(len, prompts))
    ids = [[*p[:prefix], *[0] * (width - len(p)), *p[prefix:]] for p in prompts]
    mask = [[*[1] * prefix, *[0] * (width - len(p)), *[1] * (len(p) - prefix)] for p in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def shared_batch(it: Bench, store: PagedStore) -> PagedCache:
    """Eight sequences that hold their prefixes, each prefix computed once, by one who has gone."""
    for prefix in PREFIXES:
        writer = PagedCache(store, [store.start()])
        it.feed(writer, [prefix])
        store.publish(writer.sequences[0], store.keys(prefix, SCOPE))
        writer.reset()
    sequences = []
    for prompt in PROMPTS:
        keys = store.keys(prompt, SCOPE)
        sequences.append(store.start(store.prefixes.match(keys, len(prompt))))
    return PagedCache(store, sequences)


def copied_batch(it: Bench) -> ContiguousCache:
    """The same in one piece: every sequence has its own copy of the prefix's rows."""
    batch = it.contiguous(BATCH)
    singles = []
    for prefix in PREFIXES:
        single = it.contiguous(1)
        it.feed(single, [prefix])
        singles.append(single)
    batch.extend(REUSED)
    for layer in it.rows.layers.attention_layers:
        views = [single.view(layer) for single in singles]
        planes = []
        for plane in range(len(views[0])):
            rows = [
                torch.nn.functional.pad(
                    views[index % 2][plane][0, :reused], (0, 0, 0, 0, 0, 12 - reused)
                )
                for index, reused in enumerate(REUSED)
            ]
            planes.append(torch.stack(rows))
        batch.append(layer, *planes)
    batch.advance()
    return batch
