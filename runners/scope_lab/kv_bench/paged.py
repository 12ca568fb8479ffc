"""What blocks cost against one piece, and what sharing them saves.

Speeds are ratios of things that were timed in the same round, in processor time of one thread, or
of all that `--threads` asks for. The model is a small Llama with random weights: tokens mean
nothing, times and bytes do.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from scope_lab.cache_peak import RowsCache, peak_bytes
from scope_lab.kv_bench.result import Curve, Effort, Line, Part, Quality, SystemResult
from scope_lab.kv_bench.stopwatch import Stopwatch, median_ratio
from scope_lab.recall.model import new_recall_model
from scope_rt.kv_cache.block_pool import BlockPool
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import PagedStore, num_blocks_in
from scope_rt.lm.decode_loop import DecodeLoop
from scope_rt.lm.model_rows import ModelRows, model_rows
from scope_rt.lm.requests import Completion, Request, Specialist
from scope_rt.lm.specs.row_storage import BLOCK_SIZE
from scope_rt.lm.step import AppendingCache, next_logits

CPU = torch.device("cpu")
VOCAB = 512
NUM_SPECIALISTS = 8
DECILES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is decoded, and how often it is timed."""

    context: int
    """Tokens of the longest sequence before the first step; the others are shorter."""
    steps: int
    prefix: int
    """Tokens that the prompts of the reuse measurement share."""
    rounds: int
    pool_operations: int


SCALES: Mapping[Effort, Scale] = {
    Effort.QUICK: Scale(context=96, steps=4, prefix=256, rounds=1, pool_operations=100_000),
    Effort.FULL: Scale(context=512, steps=16, prefix=1024, rounds=5, pool_operations=1_000_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReuse:
    """The same requests with and without a shared prefix."""

    tokens_alone: int
    """Prompt tokens computed without sharing."""
    tokens_shared: int
    seconds_alone: float
    seconds_shared: float

    @property
    def tokens_saved(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return 1 - self.tokens_shared / self.tokens_alone

    @property
    def time_saved(self) -> float:
        """Share of the processor time that was not spent."""
        return 1 - self.seconds_shared / self.seconds_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class BackPressure:
    """Eight specialists on a pool that does not hold all of their requests at once."""

    num_requests: int
    num_blocks: int
    preemptions: int
    tokens_again: int
    """Computed or found a second time, because their blocks had been given away."""
    answers_equal: int
    """Requests whose answer is that of a pool with room for everybody."""


def measure(effort: Effort) -> Part:
    """All that is measured of paged caches, the prefix cache and the decode loop."""
    scale = SCALES[effort]
    reuse, pressure = measure_prefix_reuse(scale), measure_back_pressure()
    costs_ns = pool_cost_by_decile(scale.pool_operations)
    notes = (
        f"a Llama of 2 layers and 2 K/V heads of 32, float32; batch 8, up to {scale.context} "
        f"tokens each, blocks of {BLOCK_SIZE}",
        "no kernel here reads a block table: batches are gathered, one sequence on adjacent "
        "blocks is not",
        f"{pressure.num_requests} requests to {NUM_SPECIALISTS} specialists on "
        f"{pressure.num_blocks} blocks: {pressure.preemptions} preemptions, "
        f"{pressure.tokens_again} tokens started again, {pressure.answers_equal} answers as on a "
        "pool with room for all",
    )
    curve = Curve(
        key="block_pool_cost",
        title=f"{scale.pool_operations:,} blocks taken and given back",
        x_label="operations so far",
        y_label="ns an operation",
        lines=(
            Line(
                name="block pool",
                points=tuple(
                    (scale.pool_operations * (index + 1) / DECILES, cost)
                    for index, cost in enumerate(costs_ns)
                ),
            ),
        ),
    )
    systems = (*measure_decoding(scale), _reuse_row(reuse))
    return Part(title="paged", systems=systems, curves=(curve,), notes=notes)


def measure_decoding(scale: Scale) -> tuple[SystemResult, ...]:
    """Batched decoding in one piece and on blocks, each against computing the past anew."""
    model = new_recall_model(VOCAB, seed=0).eval()
    rows = model_rows(model)
    batch = [_tokens(scale.context - 8 * index, seed=index) for index in range(8)]
    single = batch[:1]
    makers: dict[str, Callable[[], tuple[RowsCache, list[list[int]]]]] = {
        "contiguous": lambda: (_contiguous(rows, 8, scale), batch),
        "paged": lambda: (_paged(rows, 8, scale), batch),
        "contiguous, batch 1": lambda: (_contiguous(rows, 1, scale), single),
        "paged in place, batch 1": lambda: (_paged(rows, 1, scale), single),
    }
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    anew: dict[int, list[float]] = {1: [], 8: []}
    caches: dict[str, RowsCache] = {}
    for _ in range(scale.rounds):
        for name, make in makers.items():
            cache, texts = make()
            seconds[name].append(_decode_seconds(model, rows, cache, texts, scale.steps))
            caches[name] = cache
        for size, times in anew.items():
            times.append(_recompute_seconds(model, batch[:size]))
    results = []
    for name, cache in caches.items():
        size, other = len(cache.lengths), _CONTIGUOUS[len(cache.lengths)]
        num_gathered = cache.counters.gathers  # before the peak is measured on a view of its own
        results.append(
            SystemResult(
                name=name,
                bytes_per_token=cache.format.bytes_per_row * rows.layers.num_slots,
                peak_bytes=peak_bytes(cache),
                throughput_vs_recompute=median_ratio(anew[size], seconds[name]),
                throughput_vs_contiguous=median_ratio(seconds[other], seconds[name]),
                notes=(f"{num_gathered} views gathered",),
            )
        )
    return tuple(results)


_CONTIGUOUS = {1: "contiguous, batch 1", 8: "contiguous"}


def measure_prefix_reuse(scale: Scale) -> PrefixReuse:
    """Eight prompts that begin alike, with one salt and with a salt for each."""
    specialist = Specialist("one", new_recall_model(VOCAB, seed=0).eval())
    prefix = _tokens(scale.prefix, seed=50)
    requests = [
        Request(
            name=str(index),
            specialist="one",
            prompt=(*prefix, *_tokens(BLOCK_SIZE, seed=60 + index)),
            max_new_tokens=1,
        )
        for index in range(8)
    ]
    row_bytes = specialist.rows.row_format.bytes_per_row * specialist.rows.layers.num_slots
    budget_bytes = row_bytes * 8 * (scale.prefix + 3 * BLOCK_SIZE)  # all of them, unshared
    alone: list[tuple[float, int]] = []
    shared: list[tuple[float, int]] = []
    for _ in range(scale.rounds):
        for times, salts in ((alone, [request.name for request in requests]), (shared, [""] * 8)):
            loop = _loop([specialist], budget_bytes)
            salted = [_salted(*pair) for pair in zip(requests, salts, strict=True)]
            with Stopwatch() as watch:
                for request in salted:  # one after the other: what is shared must be there first
                    loop.submit(request)
                    loop.run()
            times.append((watch.seconds, loop.counters.tokens_prefilled))
    return PrefixReuse(
        tokens_alone=alone[0][1],
        tokens_shared=shared[0][1],
        seconds_alone=median(seconds for seconds, _ in alone),
        seconds_shared=median(seconds for seconds, _ in shared),
    )


def measure_back_pressure(num_requests: int = 32, budget_bytes: int = 400_000) -> BackPressure:
    """The same requests to eight specialists on a small pool and on a large one."""
    specialists = [
        Specialist(f"specialist {index}", new_recall_model(VOCAB, seed=index).eval())
        for index in range(NUM_SPECIALISTS)
    ]
    requests = [
        Request(
            name=str(index),
            specialist=specialists[index % NUM_SPECIALISTS].name,
            prompt=tuple(_tokens(20 + 5 * (index % 9), seed=index % NUM_SPECIALISTS)),
            max_new_tokens=12 + 3 * (index % 4),
        )
        for index in range(num_requests)
    ]
    small, large = _loop(specialists, budget_bytes), _loop(specialists, 20 * budget_bytes)
    answers, expected = _answers(small, requests), _answers(large, requests)
    started = [
        sum((it.tokens_prefilled, it.tokens_decoded, it.tokens_reused))
        for it in (small.counters, large.counters)
    ]
    return BackPressure(
        num_requests=num_requests,
        num_blocks=small.store.pool.num_blocks,
        preemptions=small.counters.preemptions,
        tokens_again=started[0] - started[1],
        answers_equal=sum(answers[name].tokens == expected[name].tokens for name in expected),
    )


def pool_cost_by_decile(num_operations: int, *, num_blocks: int = 65_536) -> tuple[float, ...]:
    """Nanoseconds of processor time an operation, for each tenth of them.

    An operation takes a block or gives one back. Every fourth table is registered, the pool is full
    throughout, and the oldest table goes for the newest: lists, links and index all take part.
    """
    pool, per_table, costs = BlockPool(num_blocks), 8, []
    tables = deque(pool.allocate(per_table) for _ in range(num_blocks // per_table))
    serial = 0
    warm_up = [num_blocks // per_table]  # every block once: first touches are not the pool's cost
    for count in warm_up + [num_operations // DECILES // (2 * per_table)] * DECILES:
        with Stopwatch() as watch:
            for _ in range(count):
                pool.free(tables.popleft())
                table = pool.allocate(per_table)
                serial += 1
                if serial % 4 == 0:
                    for place, block in enumerate(table):
                        pool.register(block, (serial, place))
                tables.append(table)
        costs.append(watch.seconds * 1e9 / (2 * per_table * count))
    return tuple(costs[1:])


def _reuse_row(reuse: PrefixReuse) -> SystemResult:
    return SystemResult(
        name="prefix cache",
        quality=(
            Quality(name="prompt tokens not computed", value=100 * reuse.tokens_saved, unit="%"),
            Quality(name="processor time saved", value=100 * reuse.time_saved, unit="%"),
        ),
        notes=(
            f"{reuse.tokens_shared} of {reuse.tokens_alone} prompt tokens computed, "
            f"{reuse.seconds_shared:.3f} of {reuse.seconds_alone:.3f} s",
        ),
    )


def _decode_seconds(
    model: Any, rows: ModelRows, cache: AppendingCache, texts: Sequence[list[int]], steps: int
) -> float:
    """Processor time of one decoding step, once `texts` are cached."""
    feed = next_logits(model, rows, cache, texts).argmax(-1)[:, None].tolist()
    with Stopwatch() as watch:
        for _ in range(steps):
            feed = next_logits(model, rows, cache, feed).argmax(-1)[:, None].tolist()
    return watch.seconds / steps


@torch.no_grad()
def _recompute_seconds(model: Any, texts: Sequence[list[int]]) -> float:
    """Processor time of one step without a cache: the whole past, each sequence for itself."""
    with Stopwatch() as watch:
        for text in texts:
            model(torch.tensor([text]), use_cache=False, logits_to_keep=1)
    return watch.seconds


def _contiguous(rows: ModelRows, batch: int, scale: Scale) -> ContiguousCache:
    length = scale.context + scale.steps + 1
    return ContiguousCache(
        rows.row_format, layers=rows.layers, batch=batch, max_tokens=length, device=CPU
    )


def _paged(rows: ModelRows, batch: int, scale: Scale) -> PagedCache:
    blocks = -(-(scale.context + scale.steps + 1) // BLOCK_SIZE)
    return PagedCache.allocate(
        rows.row_format,
        layers=rows.layers,
        batch=batch,
        num_blocks=batch * blocks,
        block_size=BLOCK_SIZE,
        device=CPU,
    )


def _loop(specialists: Sequence[Specialist], budget_bytes: int) -> DecodeLoop:
    """Specialists over one pool that takes no more than `budget_bytes`."""
    rows = specialists[0].rows
    store = PagedStore(
        rows.row_format,
        layers=rows.layers,
        num_blocks=num_blocks_in(
            budget_bytes, rows.row_format, windows=rows.windows, block_size=BLOCK_SIZE
        ),
        block_size=BLOCK_SIZE,
        device=CPU,
        windows=rows.windows,
    )
    return DecodeLoop(specialists, store)


def _answers(loop: DecodeLoop, requests: Sequence[Request]) -> dict[str, Completion]:
    for request in requests:
        loop.submit(request)
    return {answer.request.name: answer for answer in loop.run()}


def _salted(request: Request, salt: str) -> Request:
    return Request(
        name=request.name,
        specialist=request.specialist,
        prompt=request.prompt,
        max_new_tokens=request.max_new_tokens,
        salt=salt,
    )


def _tokens(count: int, *, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    numbers: list[int] = torch.randint(1, VOCAB, (count,), generator=generator).tolist()
    return numbers
