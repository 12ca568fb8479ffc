"""A stream that fails, and the one that resumes it; not a test itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scope_contracts.envelope import LATENTS_OUT
from scope_contracts.errors import PeerLostError, ScopeError
from scope_rt.checks import Checks
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.models.generator import ChunkGenerator
from scope_rt.session import StreamSession
from tests.integrity.corruption import PROMPT, Change, flip_bit
from tests.tiny_folder import tiny_folder

NUM_CHUNKS, WITHIN = 12, 4
AT = 6
"""The chunk at which something is changed."""
NEW_PROMPT = ScheduledEvent(chunk_index=5, prompt="a white triangle")
What = tuple[FaultPoint, Callable[[Any], Any]]


def flip_weight(generator: ChunkGenerator) -> None:
    flip_bit(generator.model.get_parameter("blocks.0.attn1.to_q.weight"))


def spoil(answer: tuple[object, dict[str, torch.Tensor]]) -> object:
    result, tensors = answer
    return result, tensors | {LATENTS_OUT: tensors[LATENTS_OUT] * torch.nan}


def lose(value: object) -> None:
    raise PeerLostError("rank 1 closed the connection")


FLIPPED: What = (FaultPoint.GENERATOR, flip_weight)
NAN: What = (FaultPoint.RESULT, spoil)
LOST: What = (FaultPoint.GENERATOR, lose)


class Both:
    """One fault after the other."""

    def __init__(self, *changes: Any) -> None:
        self.changes = changes

    def reach(self, point: FaultPoint, chunk: int, value: Any) -> Any:
        for change in self.changes:
            value = change.reach(point, chunk, value)
        return value


def settings_in(place: Path, **settings: Any) -> StreamConfig:
    given: dict[str, Any] = {
        "model": tiny_folder(),
        "log": place / "log",
        "snapshot": place / "snapshot",
        "verify_within": WITHIN,
    }
    return StreamConfig.of(**(given | settings))


def broken(
    place: Path,
    what: What,
    *,
    at: int = AT,
    events: Sequence[ScheduledEvent] = (NEW_PROMPT,),
    num_chunks: int = NUM_CHUNKS,
    checks: Checks | None = None,
    shown: Sequence[Chunk] = (),
    each: Callable[[StreamSession, Chunk], object] = lambda session, chunk: None,
    **settings: Any,
) -> tuple[list[Chunk], ScopeError]:
    """What a stream showed before it failed, and its error.

    `shown` is what an earlier process showed of it; `each` is called with every chunk.
    """
    change = Change(what[0], at, what[1])
    instruments = Instruments(faults=change, checks=checks or Checks())
    have = list(shown)
    with (
        pytest.raises(ScopeError) as raised,
        StreamSession(settings_in(place, **settings), instruments=instruments) as session,
    ):
        for chunk in session.stream(
            PROMPT,
            num_chunks=num_chunks,
            schedule=events,
            acknowledged=lambda: max(0, len(have) - 2 * (not shown)),
        ):
            have.append(chunk)
            each(session, chunk)
    assert change.was_made
    return have, raised.value


def continued(
    place: Path, shown: Sequence[Chunk], *, num_chunks: int = NUM_CHUNKS, **settings: Any
) -> tuple[list[Chunk], int]:
    """The whole stream as its consumer has it after a resume, and where it was planned anew."""
    with StreamSession(settings_in(place, resume=True, **settings)) as session:
        first = session.resumed_at_chunk
        assert first is not None
        kept = [chunk for chunk in shown if chunk.chunk_index < first]
        kept = kept[: max(session.num_acknowledged_before, len(kept) - 1)]
        have = len(kept)
        more = session.stream("none", num_chunks=num_chunks, acknowledged=lambda: have)
        return kept + list(more), first


def clean(*events: ScheduledEvent, num_chunks: int = NUM_CHUNKS) -> list[Chunk]:
    """The stream as it should be, with `events` in addition to the new prompt."""
    with StreamSession(StreamConfig.of(tiny_folder())) as session:
        return list(session.stream(PROMPT, num_chunks=num_chunks, schedule=[NEW_PROMPT, *events]))


def as_shown(chunks: Sequence[Chunk]) -> list[tuple[int, int, str, str, bytes]]:
    return [
        (c.chunk_index, c.cache_epoch, c.prompt, c.latents_sha256, c.frames.tobytes())
        for c in chunks
    ]
