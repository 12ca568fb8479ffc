"""Streams of one process in which something changes on rank0; not a test itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from scope_rt.checks import Checks
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Arrived, Chunk
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.session import StreamSession
from scope_rt.vae.checked import CheckedDecoder
from scope_rt.vae.tiny import TinyVideoCodec
from tests.integrity.audited import nothing
from tests.integrity.corruption import PROMPT, Change, flip_bit
from tests.tiny_folder import tiny_folder

AT, WITHIN = 3, 4
"""The chunk at which something is changed, and M in the tests of the default."""


UNTOUCHED = Change(FaultPoint.START, 0, nothing)


def shown_with(
    change: Any,
    *,
    num_chunks: int = AT + 3,
    checks: Checks | None = None,
    events: Sequence[ScheduledEvent] = (),
    shown: list[Chunk] | None = None,
    each: Callable[[StreamSession, Chunk], object] = lambda session, chunk: None,
    **settings: Any,
) -> list[Chunk]:
    """What a stream showed; `shown` has it also where the stream raises."""
    shown = [] if shown is None else shown
    given: dict[str, Any] = {"model": tiny_folder(), "verify_within": WITHIN}
    config = StreamConfig.of(**(given | settings))
    instruments = Instruments(faults=change, checks=checks or Checks())
    with StreamSession(config, instruments=instruments) as session:
        for chunk in session.stream(PROMPT, num_chunks=num_chunks, schedule=events):
            shown.append(replace(chunk, frames=chunk.frames.copy(), latents=chunk.latents.clone()))
            each(session, chunk)
    return shown


def pixels(chunks: Sequence[Chunk]) -> list[bytes]:
    return [chunk.frames.tobytes() for chunk in chunks]


def flip_codec_weight(decoder: CheckedDecoder) -> None:
    assert isinstance(decoder.codec, TinyVideoCodec)
    flip_bit(decoder.codec.decoder.get_parameter("full.bias"))


def nudge(arrived: Arrived) -> Arrived:
    return replace(arrived, latents=arrived.latents + 1e-3)
