"""What each part of verifying takes of a chunk, timed inside a running stream.

Each function that belongs to a part is wrapped by a clock of its thread's CPU time; what it calls
of another part counts there. To look at that clock takes longer than some parts do, as its code is
cold between two kernels: what it takes is measured at each call, and left out.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

from scope_rt.control.emission import Emission
from scope_rt.control.pipeline import Pipeline
from scope_rt.control.plan_check import PlanCheck
from scope_rt.integrity.arithmetic import ArithmeticCheck
from scope_rt.integrity.canary import Canary
from scope_rt.integrity.edges import EdgeCheck
from scope_rt.integrity.made_state import MadeState
from scope_rt.integrity.pictures import PictureCheck
from scope_rt.integrity.recorder import BlockRecorder
from scope_rt.integrity.state_audit import StateAudit
from scope_rt.integrity.verifier import Verifier
from scope_rt.kv_cache.row_ledger import RowLedger
from scope_rt.kv_cache.slot_cache import SlotCache
from scope_rt.mesh import rank
from scope_rt.mesh.peer_check import PeerCheck
from scope_rt.models.generator import ChunkGenerator

GENERATION = "generation"
_PARTS: dict[str, tuple[tuple[object, str], ...]] = {
    "rows as written": ((RowLedger, "note"), (RowLedger, "_flush")),
    "rows before they are replaced": ((SlotCache, "_verify_leaving"),),
    "state in rotation": ((StateAudit, "verify"), (StateAudit, "verify_leaving")),
    "blocks computed again": (
        (ArithmeticCheck, "begin"),
        (ArithmeticCheck, "end"),
        (BlockRecorder, "_before"),
        (BlockRecorder, "_after"),
        (BlockRecorder, "_keep"),
        (BlockRecorder, "_look_at"),
    ),
    "what enters and leaves blocks, and noise": ((EdgeCheck, "begin"), (EdgeCheck, "end")),
    "text and modulations": ((MadeState, "begin"), (MadeState, "end")),
    "fixed chunk": ((Canary, "run"),),
    "digest of results, and the rest": ((Verifier, "begin"), (Verifier, "end")),
    "numeric settings": ((rank, "numeric_settings"),),
    "comparison with other ranks": ((PeerCheck, "before"), (PeerCheck, "after")),
    "values of latents": ((Pipeline, "_check_latents"),),
    "plans; latents and text on rank0": (
        (PlanCheck, "verify"),
        (PlanCheck, "planned"),
        (Pipeline, "_check_sent"),
        (Pipeline, "check_kept"),
    ),
    "pictures and codec": ((PictureCheck, "verify"),),
    "what is handed out": ((Emission, "decoded"), (Emission, "verify")),
    GENERATION: ((ChunkGenerator, "generate"),),
}


@dataclass(slots=True)
class _Clock:
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inside: list[float] = field(default_factory=list)
    """Of each call that runs now: what others took in it."""

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def run(*arguments: Any, **named: Any) -> Any:
            self._inside.append(0.0)
            looked_s, start_s = time.thread_time(), time.thread_time()
            try:
                return work(*arguments, **named)
            finally:
                end_s, look_s = time.thread_time(), start_s - looked_s
                self.seconds[name] += end_s - start_s - look_s - self._inside.pop()
                if self._inside:  # three looks, two of which lie between the first and the last
                    self._inside[-1] += end_s - looked_s + look_s

        return run


@contextmanager
def _timed_parts() -> Iterator[_Clock]:
    clock = _Clock()
    with ExitStack() as patches:
        for name, places in _PARTS.items():
            for owner, attribute in places:
                work = clock.timed(name, getattr(owner, attribute))
                patches.enter_context(patch.object(owner, attribute, work))
        yield clock


def parts_of(stream: Callable[[], Iterator[object]], *, num_chunks: int, warm_up: int) -> str:
    """A table of what parts take of the chunks of `stream`, on average."""
    chunks_s: list[float] = []
    with _timed_parts() as clock:
        for number, _ in enumerate(_each_timed(stream(), chunks_s)):
            if number + 1 == warm_up:
                clock.seconds.clear()
            if number + 1 == warm_up + num_chunks:
                break
    chunk_s = statistics.mean(chunks_s[warm_up:])
    row = "| {:<42} | {:>12} | {:>10} |".format
    lines = [row("part", "µs a chunk", "of a chunk"), f"|{'-' * 44}|{'-' * 13}:|{'-' * 11}:|"]
    verified_s = sum(s for name, s in clock.seconds.items() if name != GENERATION) / num_chunks
    for name in _PARTS:
        if name != GENERATION:
            part_s = clock.seconds[name] / num_chunks
            lines.append(row(name, f"{part_s * 1e6:.0f}", f"{part_s / chunk_s:.2%}"))
    lines.append(row("**sum**", f"{verified_s * 1e6:.0f}", f"{verified_s / chunk_s:.2%}"))
    lines.append(row("a chunk, decode with it", f"{chunk_s * 1e6:.0f}", ""))
    return "\n".join(lines)


def _each_timed(stream: Iterator[object], chunks_s: list[float]) -> Iterator[object]:
    while True:
        start_s = time.thread_time()
        chunk = next(stream, None)
        chunks_s.append(time.thread_time() - start_s)
        if chunk is None:
            return
        yield chunk
