"""The whole runtime behind one object: `for chunk in StreamSession("tiny").stream(prompt)`.

Every rank of a plan runs the same lines; on mesh ranks `stream` serves rank0 and yields nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_rt.config import RuntimeConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.controller import Controller, Stages
from scope_rt.control.inbox import Conditioning, Directive, Receipt, ScheduledDirective
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.control.recording import NullRecorder, StreamRecorder
from scope_rt.control.transition import TransitionSpec
from scope_rt.instruments import Instruments
from scope_rt.mesh.full_pipeline import FullPipeline
from scope_rt.mesh.loaded import MeshResumePoint
from scope_rt.mesh.rank import Rank
from scope_rt.mesh.topology import Topology, plan_named
from scope_rt.models.loading import EMBEDDED
from scope_rt.models.noise import SeededNoise
from scope_rt.models.past import Past, own_past
from scope_rt.record.recorder import Recorder
from scope_rt.record.snapshot import Checkpoint, StreamState
from scope_rt.stream_setup import StreamSetup
from scope_rt.trace import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """What happens at the first chunk from `chunk_index` on: any of a prompt change (soft with a
    `transition`), a hard cut, and a rebuild of the cache from context."""

    chunk_index: int
    prompt: str | None = None
    transition: TransitionSpec | None = None
    hard_cut: bool = False
    recompute: bool = False


class StreamSession:
    """A stream of one model under one plan.

    Args:
        model: a model folder, or "tiny" for the embedded model.
        plan: `single`, `tp_v0`, `tp_v1_1`, `pp0` or `pp1`; all but `single` need one process per
            rank (`scope-rt stream` starts them, or torchrun does).
        tp: tensor-parallel degree of the generator group.
        seed: base seed; equal seeds, prompts and schedules give equal streams.
        height, width: pixels; the model's own size where not given.
        dtype: of weights, cache and latents.
        kv_cache_attention_bias: weight of past chunks, 0 < bias <= 1; a transition may leave it.
        kv_cache: `ring`, `quantized`, `h2o`, `paged` or `hierarchical`, all but `ring` also with a
            codec (`quantized:int4`); `SCOPE_KV_CACHE`, or the ring, where not given.
        recompute: `r1`, `r0a` or `r0` for models that keep their cache by recompute.
        instruments: where stages are traced; `break-it` hands in its faults with them.
        checkpoint: a file that rank0 replaces after every chunk; delete it when its consumer has
            all it wanted.
        resume: whether to go on where `checkpoint` was saved, if it exists. By default, if ranks
            that this launcher started before have saved it; else `stream` deletes it.
        record: a new file for the flight recorder; it is continued by a resumed stream.
        past: what later chunks are told of a chunk: its own latents, but in a replay.

    Raises:
        UserInputError: an argument cannot be used; the sentence says what to change.
        ParityError: ranks were started with different settings, or hold other weights.
        LinkError: the other ranks did not come.
    """

    def __init__(
        self,
        model: str | Path = EMBEDDED,
        *,
        plan: str = PlanId.SINGLE,
        tp: int = 1,
        seed: int = 0,
        height: int | None = None,
        width: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_cache_attention_bias: float = 1.0,
        kv_cache: str | None = None,
        recompute: str | None = None,
        instruments: Instruments | None = None,
        checkpoint: Path | None = None,
        resume: bool | None = None,
        record: Path | None = None,
        past: Past = own_past,
        config: RuntimeConfig | None = None,
    ) -> None:
        self._instruments = instruments or Instruments()
        self.trace = self._instruments.trace
        config = config or RuntimeConfig.from_environment()
        setup = self._setup = StreamSetup.of(
            model,
            topology=Topology(plan_id=plan_named(plan), tp_degree=tp),
            config=config,
            seed=seed,
            height=height,
            width=width,
            dtype=dtype,
            kv_cache_attention_bias=kv_cache_attention_bias,
            kv_cache=kv_cache,
            recompute=recompute,
            past=past,
        )
        self.recipe, self.cache_spec = setup.recipe, setup.cache_spec
        self.cache_bytes = self.cache_spec.num_bytes(setup.rank.topology.tp_degree)
        """Of a generator rank."""
        self.is_control_rank = config.rank == 0
        self._recorder: StreamRecorder = NullRecorder()
        self._controller: Controller | None = None
        self._served = False
        self._spans: tuple[Span, ...] | None = None
        self._memory = setup.memory()
        pipeline = FullPipeline(
            noise=SeededNoise(),
            decoder=setup.codec.streaming_decoder(),
            memory=self._memory,
            past=past,
        )
        self._rank = Rank(
            setup.rank, setup.geometry, instruments=self._instruments, pipeline=pipeline
        )
        with ExitStack() as on_error:
            on_error.callback(self._rank.leave)
            kept = None
            if self.is_control_rank and checkpoint is not None:
                kept = Checkpoint(checkpoint, setup.identity(), run_id=self._rank.run_id)
            self._checkpoint = kept
            saved = None if kept is None else _saved(kept, setup.settings, config, resume=resume)
            planner = Planner(settings=setup.settings) if saved is None else saved.position.planner
            resume_point = MeshResumePoint(position=planner.position)
            if saved is not None:
                resume_point = replace(
                    resume_point, memory=saved.memory, decoder=saved.decoder_after
                )
            self._rank.start(resume_point)
            self.resumed_at_chunk = None if saved is None else planner.next_chunk_index
            """The first chunk that is planned anew, where the session goes on with a stream."""
            self.num_held_before = 0 if saved is None else saved.num_held
            """Chunks that the consumer held for good when that stream was saved."""
            if self.is_control_rank:
                if record is not None:
                    opened = setup.opened(model=str(model), resumed_at_chunk=self.resumed_at_chunk)
                    self._recorder = Recorder(
                        record,
                        opened,
                        resume=saved is not None,
                        faults=self._instruments.faults,
                    )
                self._controller = self._control(planner, kept)
                if saved is not None:
                    self._controller.resume(saved)
            on_error.pop_all()

    @property
    def recording_failure(self) -> str | None:
        """Why the flight recorder stopped early, in one sentence, if it did."""
        return self._recorder.failure

    def stream(
        self,
        prompt: str,
        *,
        num_chunks: int | None = None,
        schedule: Sequence[ScheduledEvent] = (),
        num_held: Callable[[], int] | None = None,
    ) -> Iterator[Chunk]:
        """Start an epoch with `prompt` and yield its chunks, without end by default.

        Scheduled chunk indices count from the start of the session. A session that resumed goes on
        instead with the prompt and schedule it had, and `num_chunks` counts from the beginning.
        `num_held` tells how many chunks the consumer holds for good (by default all but the last
        one yielded): a resumed stream yields first what is missing there. On a mesh rank this
        serves rank0 until the session there is closed, and yields nothing.

        Raises:
            UserInputError: a prompt cannot be read; nothing was started.
            CheckpointError: an earlier stream's checkpoint cannot be removed; nothing was started.
        """
        if self._controller is None:
            if not self._served:
                self._served = True
                self._rank.serve()
            return iter(())
        if self.resumed_at_chunk is None:
            events = [self._scheduled(event) for event in schedule]
            start = Directive(hard_cut=True, drop_in_flight=True)
            start = start.then(self._directive(prompt, hard_cut=True))
            if self._checkpoint is not None:
                self._checkpoint.clear()  # not before: what is refused leaves it as it was
            self._controller.inbox.post(start)
            self._controller.inbox.schedule(events)
            self._controller.begin()
        self.resumed_at_chunk = None
        return self._controller.run(num_chunks, num_held=num_held)

    def prompt(self, text: str, transition: TransitionSpec | None = None) -> Receipt:
        """Change the prompt at the next chunk that is planned, at once or by a soft transition.

        The receipt tells at which chunk it took effect.

        Raises:
            UserInputError: the prompt cannot be read; the stream goes on with the old one.
        """
        return self._post(self._directive(text, transition=transition))

    def hard_cut(self) -> Receipt:
        """Start a new epoch at the next chunk that is planned; older chunks are dropped."""
        return self._post(Directive(hard_cut=True, drop_in_flight=True))

    def close(self) -> tuple[Span, ...]:
        """End the stream on all ranks; returns the spans of every rank. Idempotent.

        After a failure in the middle of a chunk there is nobody to say goodbye to: this rank
        leaves, which is what tells the others, and its own spans are returned. Its checkpoint
        stays then, for a session that goes on.
        """
        if self._spans is None:
            self._spans = self.trace.spans
            try:
                if self._controller is not None and self._controller.is_midway:
                    self._controller.inbox.close("the stream failed")
                else:
                    self._spans = self._end_together()
            finally:
                self._recorder.close()
                self._rank.leave()
        return self._spans

    def _end_together(self) -> tuple[Span, ...]:
        if self._controller is not None:
            self._controller.close()
        return self._rank.gather_spans()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; but a mesh rank that failed leaves at once, which is what tells the others."""
        if error is not None and not isinstance(error, GeneratorExit | KeyboardInterrupt):
            self._recorder.failed(error)
        if error is None or self.is_control_rank:
            self.close()
        else:
            self._rank.leave()

    def _post(self, directive: Directive) -> Receipt:
        if self._controller is None:
            raise UserInputError("only rank0 takes control input; call this where rank is 0")
        return self._controller.inbox.post(directive)

    def _scheduled(self, event: ScheduledEvent) -> ScheduledDirective:
        directive = self._directive(
            event.prompt,
            transition=event.transition,
            hard_cut=event.hard_cut,
            recompute=event.recompute,
        )
        return ScheduledDirective(chunk_index=event.chunk_index, directive=directive)

    def _directive(
        self,
        prompt: str | None,
        *,
        transition: TransitionSpec | None = None,
        hard_cut: bool = False,
        recompute: bool = False,
    ) -> Directive:
        if prompt is None and transition is not None:
            raise UserInputError("a transition leads to a new prompt; give one with it")
        text = None if prompt is None else Conditioning(prompt, self._setup.text_encoder([prompt]))
        return Directive(
            conditioning=text, transition=transition, hard_cut=hard_cut, recompute=recompute
        )

    def _control(self, planner: Planner, checkpoint: Checkpoint | None) -> Controller:
        """Rank0's loop over what this session has set up."""
        setup = self._setup
        stages = Stages(
            mesh=self._rank.port(),
            decoder=setup.codec.streaming_decoder(),
            memory=self._memory,
            noise=SeededNoise(),
            geometry=setup.geometry,
            cache=setup.cache_spec,
            past=setup.rank.past,
        )
        return Controller(
            planner,
            stages,
            max_in_flight=setup.rank.topology.max_in_flight,
            recorder=self._recorder,
            instruments=self._instruments,
            checkpoint=checkpoint,
        )


def _saved(
    checkpoint: Checkpoint, settings: StreamSettings, config: RuntimeConfig, *, resume: bool | None
) -> StreamState | None:
    """The state to go on with. An earlier stream may have left one that nobody asked for: the count
    of starts alone says nothing, where the checkpoint tells who saved it."""
    if resume is None:
        tells_runs = config.world_size > 1 and (config.store_is_hosted or config.run_id is not None)
        resume = checkpoint.is_of_this_run() if tells_runs else config.attempt > 0
    return checkpoint.load(settings) if resume else None
