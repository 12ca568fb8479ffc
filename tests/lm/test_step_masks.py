"""A step masks every layer by the rows that it holds, or refuses before anything is touched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import UnsupportedError
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.paged import PagedCache
from tests.lm.cache.waits import Waits
from tests.lm.paged_batch import Bench, bench
from tests.rounding import FP64_CONTRACT

pytestmark = pytest.mark.numeric

TEXT = list(range(1, 12))
"""The last one is fed after the eviction."""


def full() -> Bench:
    return bench("llama", dtype=torch.float64)


def windowed() -> Bench:
    """Two layers of one kind, each of which sees 6 tokens."""
    return bench(
        "qwen3",
        dtype=torch.float64,
        layer_types=["sliding_attention"] * 2,
        sliding_window=6,
        use_sliding_window=True,
    )


def filled(it: Bench, *kept: list[list[int]]) -> ContiguousCache:
    """A cache of all of the text but its last token, less what each layer does not keep."""
    cache = it.contiguous(len(kept[0]))
    it.feed(cache, [TEXT[:-1]] * cache.batch)
    for layer, rows in enumerate(kept):
        cache.keep(layer, torch.tensor(rows))
    return cache


def whole(it: Bench, *kept: list[int], window: int | None = None) -> Tensor:
    """Logits of one pass over the text whose last token sees in each layer what that one kept."""
    end = len(TEXT)

    def mask(rows: list[int]) -> Tensor:
        seen = torch.ones(end, end, dtype=torch.bool).tril()
        seen[-1, [position for position in range(end - 1) if position not in rows]] = False
        if window is not None:
            seen = seen.triu(1 - window)
        hidden = torch.finfo(torch.float64).min
        return torch.zeros(1, 1, end, end).double().masked_fill(~seen, hidden)

    def masking(rows: list[int]) -> Callable[..., Any]:
        return lambda module, args, kwargs: (args, kwargs | {"attention_mask": mask(rows)})

    hooks = [
        layer.self_attn.register_forward_pre_hook(masking(rows), with_kwargs=True)
        for layer, rows in zip(it.model.model.layers, kept, strict=True)
    ]
    with torch.no_grad():
        logits: Tensor = it.model(torch.tensor([TEXT]), use_cache=False).logits[0, -1]
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize(
    ("made", "kept", "says"),
    [
        (
            full,
            ([[0, 1, 2, 3], [0, 1, -1, -1]], [[0, 1, -1, -1], [0, 1, 2, 3]]),
            r"layers 0 and 1 hold \(4, 2\) and \(2, 4\) rows",
        ),
        (full, ([[0, 1, 2]], [[0, 1]]), r"layers 0 and 1 hold \(3,\) and \(2,\) rows"),
        (
            windowed,
            ([[0, 1, 8]], [[7, 8, 9]]),
            r"layers \[0, 1\], which see 6 tokens, hold rows of different positions",
        ),
    ],
    ids=["other sequences", "other counts", "other positions in a window"],
)
def test_layers_of_one_kind_that_need_masks_of_their_own_are_refused(
    made: Callable[[], Bench], kept: Any, says: str
) -> None:
    it = made()
    cache = filled(it, *kept)
    digest = cache.digest()
    with pytest.raises(UnsupportedError, match=f"{says}, and one mask serves all layers"):
        it.feed(cache, [TEXT[-1:]] * cache.batch)
    assert cache.digest() == digest
    cache.truncate(cache.lengths)  # no span was opened


def test_layers_that_see_everything_may_keep_rows_of_other_positions() -> None:
    it, kept = full(), ([0, 3, 9], [4, 5, 6])
    logits = it.feed(filled(it, *([rows] for rows in kept)), [TEXT[-1:]])
    torch.testing.assert_close(logits[0], whole(it, *kept), rtol=0, atol=FP64_CONTRACT)


def test_layers_with_a_window_may_keep_rows_of_the_same_positions() -> None:
    it, kept = windowed(), [0, 3, 6, 9]
    logits = it.feed(filled(it, [kept], [kept]), [TEXT[-1:]])
    torch.testing.assert_close(
        logits[0], whole(it, kept, kept, window=6), rtol=0, atol=FP64_CONTRACT
    )


def test_only_an_eviction_from_layers_with_a_window_makes_a_step_wait() -> None:
    it = windowed()
    store = it.store()
    for cache, waited in (
        (PagedCache(store, [store.start()]), 0),
        (it.contiguous(1), 0),
        (filled(it, [[2, 5]], [[2, 5]]), 1),
    ):
        if not cache.lengths[0]:
            it.feed(cache, [TEXT[:-1]])
        with Waits() as waits:
            it.feed(cache, [TEXT[-1:]])
        assert len(waits.names) == waited


def test_a_step_that_failed_between_layers_can_be_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    it = full()
    cache = filled(it, [[0, 3, 9]], [[4, 5, 6]])
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
        patched.setattr(it.model.model.layers[0].mlp, "forward", fail)
        it.feed(cache, [TEXT[-1:]])
    logits = it.feed(cache, [TEXT[-1:]])
    torch.testing.assert_close(
        logits[0], whole(it, [0, 3, 9], [4, 5, 6]), rtol=0, atol=FP64_CONTRACT
    )
