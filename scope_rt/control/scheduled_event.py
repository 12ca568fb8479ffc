"""What a stream's schedule asks for, in a person's words: prompts, not embeddings."""

import time
from dataclasses import dataclass

from scope_contracts.log_records import Scheduled
from scope_rt.control.transition import TransitionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """What happens at the first chunk from `chunk_index` on: any of a prompt change (soft with a
    `transition`), a hard cut, a rebuild of the cache from context, and in a replay another resting
    bias or base seed."""

    chunk_index: int
    prompt: str | None = None
    transition: TransitionSpec | None = None
    hard_cut: bool = False
    recompute: bool = False
    bias: float | None = None
    seed: int | None = None


def scheduled_record(event: ScheduledEvent) -> Scheduled:
    """`event`, asked for now, as the log of its stream has it."""
    transition = event.transition
    return Scheduled(
        at_s=time.time(),
        chunk_index=event.chunk_index,
        prompt=event.prompt,
        hard_cut=event.hard_cut,
        transition_num_chunks=0 if transition is None else transition.num_chunks,
        transition_method="" if transition is None else str(transition.method),
        transition_bias_floor=1.0 if transition is None else transition.bias_floor,
        recompute=event.recompute,
    )
