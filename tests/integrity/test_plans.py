"""What rank0 plans is what was asked for, or nothing is sent; a right plan is never refused."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from scope_contracts.errors import IntegrityError, ParityError
from scope_rt.checks import Checks
from scope_rt.config import StreamConfig
from scope_rt.control import transition
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Conditioning, Directive
from scope_rt.control.plan_check import PlanCheck
from scope_rt.control.planner import Planner
from scope_rt.control.position import Position
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.transition import Interpolation, Transition, TransitionSpec
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from tests.integrity.corruption import PROMPT, Change, stream
from tests.tiny_folder import tiny_folder

AT, NUM_CHUNKS = 5, 8
SOFTLY = TransitionSpec(num_chunks=4, method=Interpolation.SLERP, bias_floor=0.3)


def some_events() -> list[ScheduledEvent]:
    """With a transition of their own: a test may change it."""
    return [
        ScheduledEvent(chunk_index=2, prompt="a green square", transition=replace(SOFTLY)),
        ScheduledEvent(chunk_index=AT + 1, prompt="a white triangle", recompute=True),
    ]


def enveloped(**changed: Any) -> Callable[[Any, pytest.MonkeyPatch], None]:
    """From chunk `AT` on the planner makes an envelope with other values."""

    def change(session: Any, patch: pytest.MonkeyPatch) -> None:
        plan = Planner.next

        def other(self: Planner, **asked: Any) -> Any:
            envelope, following = plan(self, **asked)
            return replace(envelope, **changed), following

        patch.setattr(Planner, "next", other)

    return change


def other_step(session: Any, patch: pytest.MonkeyPatch) -> None:
    way = transition.interpolate
    patch.setattr(transition, "interpolate", lambda s, t, weight, method: way(s, t, 0.5, method))


def other_bias(session: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transition, "bias_at", lambda step, spec, rest: rest)


def other_text(session: Any, patch: pytest.MonkeyPatch) -> None:
    step, text = Position.next, session.setup.conditioning("a red circle")
    patch.setattr(
        Position,
        "next",
        lambda self, asked, **more: step(replace(self, text=text, transition=None), asked, **more),
    )


def no_text_is_sent(session: Any, patch: pytest.MonkeyPatch) -> None:
    plan = Planner.next
    patch.setattr(
        Planner, "next", lambda self, **asked: plan(self, **(asked | {"new_text": False}))
    )


def way_of(session: Any) -> Transition:
    """The transition that the stream is in."""
    found = session._loop._pipeline.position.transition
    assert isinstance(found, Transition)
    return found


def spec_in_memory(session: Any, patch: pytest.MonkeyPatch) -> None:
    object.__setattr__(way_of(session).spec, "bias_floor", 0.9)


def source_in_memory(session: Any, patch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():
        way_of(session).source[..., 0] += 0.1


CHANGES = [
    ("base_seed 9", enveloped(base_seed=9)),
    ("denoising_step_list", enveloped(denoising_step_list=(1000.0, 600.0))),
    ("kv_cache_attention_bias", enveloped(kv_cache_attention_bias=0.9)),
    ("kv_cache_attention_bias", other_bias),
    ("embeddings beside the transition's", other_step),
    ("kv_cache_attention_bias", spec_in_memory),
    ("with the transition's first embeddings", source_in_memory),
    ("prompt a red circle", other_text),
    ("reset_crossattn_cache False", no_text_is_sent),
    ("do_kv_recompute False", enveloped(do_kv_recompute=False, expected_generator_calls=3)),
]


def streamed(change: Any, patch: pytest.MonkeyPatch, checks: Checks, level: str) -> list[int]:
    shown: list[int] = []
    with StreamSession(
        StreamConfig.of(tiny_folder(), integrity=level), instruments=Instruments(checks=checks)
    ) as session:
        for chunk in session.stream(PROMPT, num_chunks=NUM_CHUNKS, schedule=some_events()):
            shown.append(chunk.chunk_index)
            if chunk.chunk_index == AT - 2:  # chunk AT - 1 is still in the transition
                change(session, patch)
    return shown


@pytest.mark.parametrize(("what", "change"), CHANGES)
def test_a_plan_that_was_not_asked_for_is_not_sent(
    what: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IntegrityError, match=f"chunk [456]: rank 0: plans {what}"):
        streamed(change, monkeypatch, Checks(), "strict")


@pytest.mark.parametrize(("what", "change"), CHANGES)
def test_without_the_check_it_is_shown(
    what: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = replace(Checks(), planned=lambda chunk, what, *, got, asked: None)
    assert streamed(change, monkeypatch, checks, "strict") == list(range(NUM_CHUNKS))


RUN: dict[str, Any] = {
    "kv_cache_attention_bias": 0.5,
    "base_seed": 99,
    "denoising_step_list": (1000.0, 600.0),
}


@pytest.mark.parametrize("name", RUN)
def test_an_envelope_that_changes_in_memory_is_not_run_unnoticed(name: str) -> None:
    """It keeps the bytes that it was planned with, and those say nothing of what is run."""

    def write(entered: Any) -> None:
        object.__setattr__(entered[0], name, RUN[name])

    shown: list[Chunk] = []
    with pytest.raises(ParityError, match=f"chunk {AT}: the state digest"):
        stream(Change(FaultPoint.ENTERED, AT, write), num_chunks=NUM_CHUNKS, shown=shown)
    assert len(shown) == AT


def test_embeddings_that_are_no_numbers_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_number(session: Any, patch: pytest.MonkeyPatch) -> None:
        way = transition.interpolate
        patch.setattr(transition, "interpolate", lambda *given: way(*given) * float("nan"))

    with pytest.raises(IntegrityError, match="plans embeddings beside the transition's nan"):
        streamed(no_number, monkeypatch, Checks(), "default")


def some_directive(draw: random.Random, dtype: torch.dtype) -> Directive:
    posted = spec = None
    if draw.random() < 0.4:
        seeded = torch.Generator().manual_seed(draw.randrange(100))
        embeds = torch.randn(1, 6, 64, generator=seeded, dtype=torch.float64)
        if draw.random() < 0.3:  # parallel, opposite and zero vectors
            embeds[:, :2], embeds[:, 4:] = embeds[:, 2:4] * -draw.choice([1, -2, 1e-6]), 0
        posted = Conditioning(f"prompt {draw.random()}", embeds.to(dtype))
        if draw.random() < 0.7:
            spec = TransitionSpec(
                num_chunks=draw.randrange(1, 6),
                method=draw.choice(list(Interpolation)),
                bias_floor=draw.choice([1.0, 0.5, 1e-3]),
            )
    return Directive(
        conditioning=posted,
        transition=spec,
        hard_cut=draw.random() < 0.1,
        recompute=draw.random() < 0.1,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_plan_of_what_anybody_may_ask_for_is_refused(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    settings = replace(StreamSetup.of(StreamConfig.of()).settings, kv_cache_attention_bias=0.8)
    text = Conditioning("first", torch.ones(1, 6, 64, dtype=dtype))
    for _ in range(20):
        position = Position(planner=Planner(settings=settings))
        directive, check = Directive(conditioning=text), PlanCheck(position, Checks())
        for number in range(60):
            if number % 20 == 19:  # a restart in the middle, of a transition too
                planner = replace(position.planner, holds_cache=False)
                position = replace(position, planner=planner)
                check = PlanCheck(position, Checks())
            envelope, following = position.next(directive)
            check.planned(check.verify(directive, envelope, following))
            position, directive = following, some_directive(draw, dtype)
