"""Rank0 and a worker never disagree about a stream, whatever comes, and in whatever order."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from scope_contracts import (
    CacheState,
    CallCountError,
    Lifecycle,
    MessageKind,
    OrderError,
    PlanId,
    PPEnvelope,
    PreflightError,
    StreamPosition,
    shutdown_envelope,
)
from tests.contracts.stream_ranks import GEOMETRY, Rank0Side, WorkerSide, verdict_of
from tests.contracts.stream_rules import (
    BLOCK,
    HEIGHT,
    PLAN,
    STEPS,
    WIDTH,
    Stream,
    announced,
    with_conditioning,
)

SELECTIONS = [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (1, 0), (0, 0), (0, 1, 2, 2)]
IDS = ("call_id", "chunk_index", "cache_epoch", "current_start_frame")
WRONG: dict[str, st.SearchStrategy[Any]] = {
    "plan_id": st.sampled_from(PlanId),
    "call_id": st.integers(-2, 40),
    "chunk_index": st.integers(-2, 40),
    "cache_epoch": st.integers(-2, 10),
    "init_cache": st.booleans(),
    "reset_kv_cache": st.booleans(),
    "reset_crossattn_cache": st.booleans(),
    "current_start_frame": st.integers(-3, 40),
    "do_kv_recompute": st.booleans(),
    "clean_pass": st.booleans(),
    "num_denoise_steps": st.integers(-1, 6),
    "expected_generator_calls": st.integers(-1, 8),
    "kv_cache_attention_bias": st.sampled_from([-0.5, 0.0, 1e-9, 0.3, 1.0, 1.0000001]),
    "denoising_step_list": st.lists(st.sampled_from([-1.0, 0.0, 500.0, *STEPS]), max_size=5).map(
        tuple
    ),
    "height": st.sampled_from([-16, 0, 8, 16, 24, 48]),
    "width": st.sampled_from([-16, 0, 8, 32, 24, 48]),
    "base_seed": st.sampled_from([-1, 0, 7, 2**63 - 1]),
    "kind": st.sampled_from(MessageKind),
}
wrong_fields = st.sampled_from(sorted(WRONG)).flatmap(
    lambda name: st.tuples(st.just(name), WRONG[name])
)
CUT, STEADY, PROMPT, RECOMPUTE, REBUILT = "cut", "steady", "prompt", "recompute", "rebuilt"
steps = st.sampled_from([STEADY, STEADY, PROMPT, RECOMPUTE, REBUILT, CUT])


class AnySequence(RuleBasedStateMachine):
    """Legal and illegal events on rank0, on a rank0 that generates itself, and on a mesh rank."""

    start_frame = False

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream(start_frame=self.start_frame)
        self.history: list[PPEnvelope] = []
        self.start_ranks()

    def start_ranks(self) -> None:
        """All ranks at the last committed ids of the stream; they hold no cache."""
        position = StreamPosition(
            call_id=self.stream.call,
            chunk_index=self.stream.chunk,
            cache_epoch=self.stream.epoch,
            next_start_frame=self.stream.start,
        )
        lifecycle = Lifecycle.resumed(plan_id=PLAN, frames_per_block=BLOCK, position=position)
        geometry = replace(GEOMETRY, start_frame=self.start_frame)
        self.rank0 = Rank0Side(lifecycle, geometry=geometry)
        self.remote = WorkerSide(lifecycle, is_remote=True, geometry=geometry)
        self.workers = [WorkerSide(lifecycle, is_remote=False, geometry=geometry), self.remote]

    def lifecycles(self) -> list[Lifecycle]:
        return [self.rank0.lifecycle, *(worker.lifecycle for worker in self.workers)]

    def next_chunk(self, step: str) -> PPEnvelope:
        """What a planner would send for `step`; whether it is legal here is another matter."""
        cut, recompute = step == CUT, step in (RECOMPUTE, REBUILT)
        clean = step != RECOMPUTE
        denoised = STEPS if self.stream.chunk >= 0 or not self.start_frame else ()
        envelope = PPEnvelope(
            plan_id=PLAN,
            call_id=self.stream.call + 1,
            chunk_index=self.stream.chunk + 1,
            cache_epoch=self.stream.epoch + cut,
            kind=MessageKind.INFER,
            init_cache=cut,
            reset_kv_cache=cut,
            reset_crossattn_cache=step in (CUT, PROMPT, REBUILT),
            current_start_frame=0 if cut else self.stream.start,
            do_kv_recompute=recompute,
            clean_pass=clean,
            num_denoise_steps=len(denoised),
            expected_generator_calls=len(denoised) + clean + recompute,
            kv_cache_attention_bias=1.0,
            denoising_step_list=denoised,
            height=HEIGHT,
            width=WIDTH,
            base_seed=7,
        )
        return replace(envelope, tensors=announced(envelope))

    def legal_chunk(self, step: str) -> PPEnvelope:
        """`step`, or what must come before it."""
        if self.stream.epoch < 0:
            step = CUT
        elif not self.stream.has_cache and step != CUT:
            step = REBUILT
        return self.next_chunk(step)

    def offer(self, envelope: PPEnvelope) -> None:
        """Give `envelope` to all: one verdict, the one that the rules give."""
        objection = self.stream.objection(envelope)
        before = self.rank0.lifecycle
        verdict = verdict_of(self.rank0, envelope)
        if objection is None:
            assert isinstance(verdict, bytes | None), verdict
            self.stream = self.stream.after(envelope)
            self.history.append(envelope)
        else:
            assert isinstance(verdict, tuple), f"accepted, want {objection.__name__}"
            assert verdict[0] is objection, verdict
            assert self.rank0.lifecycle is before
        if objection is PreflightError:  # nothing leaves rank0, not even to its own worker
            assert verdict_of(self.remote, envelope) == verdict
        else:
            assert [verdict_of(worker, envelope) for worker in self.workers] == [verdict] * 2

    @rule(several=st.lists(steps, min_size=1, max_size=8))
    def plays_on(self, several: list[str]) -> None:
        for step in several:
            self.offer(self.legal_chunk(step))

    @rule(step=steps)
    def plays_whatever_is_asked(self, step: str) -> None:
        self.offer(self.next_chunk(step))

    @rule(step=steps, skipped=st.integers(0, 3))
    def skips_chunks(self, step: str, skipped: int) -> None:
        chunk = self.legal_chunk(step)
        self.offer(replace(chunk, chunk_index=chunk.chunk_index + skipped))

    @rule(step=steps)
    def sends_conditioning_unasked(self, step: str) -> None:
        chunk = self.legal_chunk(step)
        self.offer(replace(chunk, tensors=with_conditioning(chunk)))

    @rule(step=steps, wrong=st.lists(wrong_fields, min_size=1, max_size=3), adapt=st.booleans())
    def changes_fields(self, step: str, wrong: list[tuple[str, Any]], adapt: bool) -> None:
        chunk = replace(self.legal_chunk(step), **dict(wrong))
        self.offer(replace(chunk, tensors=announced(chunk)) if adapt else chunk)

    @rule(
        bits=st.tuples(*[st.booleans()] * 5),
        epoch=st.integers(0, 1),
        from_zero=st.booleans(),
    )
    def combines_bits(
        self, bits: tuple[bool, bool, bool, bool, bool], epoch: int, from_zero: bool
    ) -> None:
        init, reset_kv, reset_cross, recompute, clean = bits
        right = self.legal_chunk(STEADY)
        chunk = replace(
            right,
            init_cache=init,
            reset_kv_cache=reset_kv,
            reset_crossattn_cache=reset_cross,
            do_kv_recompute=recompute,
            clean_pass=clean,
            expected_generator_calls=right.num_denoise_steps + clean + recompute,
            cache_epoch=self.stream.epoch + epoch,
            current_start_frame=0 if from_zero else self.stream.start,
        )
        self.offer(replace(chunk, tensors=announced(chunk)))

    @rule(step=steps, name=st.sampled_from(IDS), by=st.integers(-3, 3))
    def moves_an_id(self, step: str, name: str, by: int) -> None:
        right = self.legal_chunk(step)
        ids: dict[str, Any] = {name: getattr(right, name) + by}
        moved = replace(right, **ids)
        self.offer(replace(moved, tensors=announced(moved)))

    @rule(step=steps, keep=st.sampled_from(SELECTIONS))
    def announces_other_tensors(self, step: str, keep: tuple[int, ...]) -> None:
        chunk = self.legal_chunk(step)
        kept = tuple(chunk.tensors[at] for at in keep if at < len(chunk.tensors))
        self.offer(replace(chunk, tensors=kept))

    @rule(data=st.data(), renumbered=st.booleans())
    def repeats_the_past(self, data: st.DataObject, renumbered: bool) -> None:
        if self.history:
            old = data.draw(st.sampled_from(self.history))
            self.offer(replace(old, call_id=self.stream.call + 1) if renumbered else old)

    @rule(step=steps, extra=st.sampled_from([-5, -1, 1, 2]))
    def miscounts_its_calls(self, step: str, extra: int) -> None:
        """A rank that computed something else dies of it; then all are started again."""
        if self.stream.is_over:
            return
        chunk = self.legal_chunk(step)
        extra = max(extra, -chunk.expected_generator_calls)
        before = self.rank0.lifecycle
        self.rank0.extra_calls = extra
        wanted = verdict_of(self.rank0, chunk)
        assert isinstance(wanted, tuple)
        assert wanted[0] is CallCountError
        assert self.rank0.lifecycle is before
        for worker in self.workers:
            worker.generator.extra_calls = extra
            verdict = verdict_of(worker, chunk)
            assert isinstance(verdict, tuple)
            assert verdict[0] is CallCountError
            assert extra > 0 or verdict == wanted  # one call too many is refused on entry
            assert worker.lifecycle == before
        self.restarts()

    @rule(calls=st.integers(0, 7))
    def commits_twice(self, calls: int) -> None:
        for lifecycle in self.lifecycles():
            with pytest.raises(OrderError, match="no open chunk"):
                lifecycle.commit(calls)

    @rule(step=steps)
    def enters_while_a_chunk_is_open(self, step: str) -> None:
        chunk = self.legal_chunk(step)
        if not self.stream.is_over:
            for lifecycle in self.lifecycles():
                opened = lifecycle.enter(chunk)
                with pytest.raises(OrderError, match=f"chunk {chunk.chunk_index} is open"):
                    opened.enter(replace(chunk, call_id=chunk.call_id + 1))

    @rule(call=st.sampled_from([0, 0, 1, -1]), working=st.booleans())
    def shuts_down(self, call: int, working: bool) -> None:
        stop = shutdown_envelope(
            plan_id=PLAN,
            call_id=self.stream.call + 1 + call,
            chunk_index=max(0, self.stream.chunk),
            cache_epoch=max(0, self.stream.epoch),
        )
        self.offer(replace(stop, num_denoise_steps=4) if working else stop)

    @rule()
    def restarts(self) -> None:
        self.stream = self.stream.restarted()
        self.start_ranks()

    @invariant()
    def all_stand_where_the_rules_say(self) -> None:
        for machine in self.lifecycles():
            stream = self.stream
            assert machine == self.rank0.lifecycle
            assert (machine.call_id, machine.chunk_index) == (stream.call, stream.chunk)
            assert (machine.cache_epoch, machine.next_start_frame) == (stream.epoch, stream.start)
            assert machine.cache_end_frame == stream.end_of_cache
            assert machine.holds_cache == stream.has_cache
            assert machine.is_shut_down == stream.is_over
            assert machine.call_budget is None
            assert machine.state is (CacheState.ADVANCE if stream.has_cache else CacheState.RESET)


class AnySequenceFromPicture(AnySequence):
    """The same of a stream that begins with one."""

    start_frame = True


@pytest.mark.timeout(400)
@pytest.mark.parametrize("machine", [AnySequence, AnySequenceFromPicture])
def test_rank0_and_workers_never_disagree(machine: type[AnySequence]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=50,
            stateful_step_count=40,
            phases=[Phase.generate, Phase.shrink],  # to explain what failed takes minutes
        ),
    )
