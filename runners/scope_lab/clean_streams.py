"""Clean streams under random steering, and how near sound arithmetic came to being refused.

Everything follows from a stream's number: its combination, its settings, and what happens when.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from scope_contracts.errors import ScopeError
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.tensor_spec import DType
from scope_lab.soak.schedule import drawn_cues, drawn_places, drawn_prompt
from scope_rt.config import StreamConfig
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.integrity.oracle import BlockAudit, Stage
from scope_rt.session import StreamSession

CHUNKS = 272
"""Of one stream: the fixed chunk has its second run after 256."""
_CACHES = (
    "ring",
    "quantized:int8",
    "quantized:int4",
    "quantized:fp8",
    "h2o",
    "paged",
    "hierarchical",
)
_CUE_EVERY, _RECOMPUTE_EVERY = 9.0, 40.0
"""Chunks, on average."""


@dataclass(frozen=True, slots=True)
class Combination:
    """What streams alike."""

    dtype: str
    level: str
    cache: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.level} {self.cache}"


COMBINATIONS = tuple(
    Combination(dtype, level, cache)
    for cache, dtype, level in product(
        _CACHES,
        (DType.FLOAT32, DType.BFLOAT16),
        (IntegrityLevel.DEFAULT, IntegrityLevel.STRICT),
    )
)
"""Streams take turns through these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamResult:
    """What came of one stream; a line of the progress file."""

    capability: str
    number: int
    combination: str
    chunks: int
    error: str = ""
    closest: float = 0.0
    """The largest share of its bound that a number was off by."""
    stage: str = ""
    """Where that was."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Closest:
    share: float = 0.0
    stage: str = ""

    def see(self, stage: Stage) -> None:
        got, want, bound = (torch.as_tensor(x) for x in (stage.got, stage.want, stage.bound))
        off = (got - want).abs()
        share = float((off / bound).nan_to_num(nan=0.0).max())  # 0 of 0 is exact
        if share > self.share:
            self.share, self.stage = share, stage.name


@contextmanager
def _watched() -> Iterator[_Closest]:
    """Look at everything that is held against the reference; the product does not know."""
    closest, stages = _Closest(), BlockAudit.stages

    def seen(audit: BlockAudit) -> Iterator[Stage]:
        for stage in stages(audit):
            closest.see(stage)
            yield stage

    with patch.object(BlockAudit, "stages", seen):
        yield closest


def run_stream(capability: str, number: int, *, num_chunks: int = CHUNKS) -> StreamResult:
    """Stream number `number`, to its end or to its first error."""
    combination, random = COMBINATIONS[number % len(COMBINATIONS)], Random(f"clean {number}")
    config = StreamConfig.of(
        seed=number,
        dtype=combination.dtype,
        integrity=combination.level,
        kv_cache=combination.cache,
        kv_cache_attention_bias=random.choice((1.0, 1.0, 0.8, 0.5)),
    )
    shown, error = 0, ""
    with _watched() as closest:
        try:
            with StreamSession(config) as session:
                events, prompt = steering(random, num_chunks), drawn_prompt(random)
                for _ in session.stream(prompt, num_chunks=num_chunks, schedule=events):
                    shown += 1
        except ScopeError as raised:
            error = f"{type(raised).__name__}: {raised}"
    return StreamResult(
        capability=capability,
        number=number,
        combination=str(combination),
        chunks=shown,
        error=error,
        closest=closest.share,
        stage=closest.stage,
    )


def steering(random: Random, num_chunks: int) -> list[ScheduledEvent]:
    """Prompts at once and by transitions that change the bias, hard cuts, recomputes."""
    events = [
        ScheduledEvent(
            chunk_index=cue.chunk,
            prompt=cue.prompt,
            transition=cue.transition,
            hard_cut=cue.hard_cut,
        )
        for cue in drawn_cues(random, num_chunks, every_chunks=_CUE_EVERY)
    ]
    places = drawn_places(random, num_chunks, every_chunks=_RECOMPUTE_EVERY)
    return events + [ScheduledEvent(chunk_index=chunk, recompute=True) for chunk in places]
