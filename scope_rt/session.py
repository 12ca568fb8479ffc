"""The whole runtime behind one object: `for chunk in StreamSession("tiny").stream(prompt)`.

Every rank of a plan runs the same lines; on mesh ranks `stream` serves rank0 and yields nothing.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from scope_contracts.cache_spec import CacheChoice, CacheKind
from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_contracts.recording import NOT_RESUMED, Opened
from scope_rt import __version__
from scope_rt.config import RuntimeConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.context import ContextMemory, anchor_encoder
from scope_rt.control.controller import Controller, Stages
from scope_rt.control.inbox import Conditioning, Directive, Receipt, ScheduledDirective
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.control.recompute import Recompute, choose_recompute
from scope_rt.control.recording import NullRecorder, StreamRecorder
from scope_rt.control.stream_state import Checkpoint, StreamState
from scope_rt.control.transition import TransitionSpec
from scope_rt.faults import Faults, InjectedFaults, NoFaults, decode
from scope_rt.instruments import Instruments
from scope_rt.mesh.full_pipeline import FullPipeline
from scope_rt.mesh.rank import Rank, RankSetup, Stand
from scope_rt.mesh.topology import Topology, plan_named
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.models.noise import SeededNoise
from scope_rt.models.past import Past, own_past
from scope_rt.models.recipe import Recipe
from scope_rt.models.shards import check_degree
from scope_rt.streaming.recorder import Recorder
from scope_rt.streaming.trace import NullTrace, Span, Trace
from scope_rt.tensors import NAMES
from scope_rt.vae.codec import VideoCodec


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
        trace: where stages are recorded.
        checkpoint: a file that rank0 replaces after every chunk; delete it when its consumer has
            all it wanted.
        resume: whether to go on where `checkpoint` was saved, if it exists. By default, if ranks
            that this launcher started before have saved it; else it is deleted.
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
        trace: Trace | None = None,
        checkpoint: Path | None = None,
        resume: bool | None = None,
        record: Path | None = None,
        past: Past = own_past,
        config: RuntimeConfig | None = None,
    ) -> None:
        self.trace: Trace = trace or NullTrace()
        config = config or RuntimeConfig.from_environment()
        folder = ModelFolder.open(model)
        self.recipe = folder.recipe
        height = self.recipe.default_height if height is None else height
        width = self.recipe.default_width if width is None else width
        topology = Topology(plan_id=plan_named(plan), tp_degree=tp)
        check_degree(folder.config, tp)
        chosen = choose_recompute(self.recipe, recompute, every=config.kv_cache_recompute_every)
        cache = choose_cache(self.recipe, kv_cache, config)
        codec, self._text_encoder = folder.codec(), folder.text_encoder()
        geometry = folder.geometry(codec=codec, text=self._text_encoder, dtype=dtype)
        check_inputs(
            height=height,
            width=width,
            multiple=geometry.pixel_multiple,
            seed=seed,
            kv_cache_attention_bias=kv_cache_attention_bias,
        )
        setup = RankSetup(
            model=folder,
            topology=topology,
            config=config,
            dtype=dtype,
            height=height,
            width=width,
            recompute_every=chosen.every,
            recompute_anchor=str(chosen.anchor),
            cache=cache,
            past=past,
        )
        settings = StreamSettings(
            plan_id=topology.plan_id,
            recipe=folder.recipe,
            height=height,
            width=width,
            base_seed=seed,
            kv_cache_attention_bias=kv_cache_attention_bias,
            recompute_every=chosen.every,
            bring_up=config.bring_up,
        )
        self.cache_spec = setup.cache_spec(geometry)
        self.cache_bytes = self.cache_spec.num_bytes(topology.tp_degree)
        """Of a generator rank."""
        self.is_control_rank = config.rank == 0
        self._instruments = instruments_of(config, self.trace)
        self._recorder: StreamRecorder = NullRecorder()
        self._controller: Controller | None = None
        self._served = False
        self._spans: tuple[Span, ...] | None = None
        memory = self._memory(codec, chosen)
        pipeline = FullPipeline(
            noise=SeededNoise(),
            decoder=codec.streaming_decoder(),
            memory=memory,
            past=past,
        )
        self._rank = Rank(setup, geometry, instruments=self._instruments, pipeline=pipeline)
        with ExitStack() as on_error:
            on_error.callback(self._rank.leave)
            self._checkpoint: Checkpoint | None = None
            saved = None
            if self.is_control_rank and checkpoint is not None:
                identity = _identity(setup, settings)
                self._checkpoint = Checkpoint(checkpoint, identity, run_id=self._rank.run_id)
                saved = _saved(self._checkpoint, settings, config, resume=resume)
            planner = Planner(settings=settings) if saved is None else saved.position.planner
            stand = Stand(position=planner.position)
            if saved is not None:
                stand = replace(stand, memory=saved.memory, decoder=saved.decoder_after)
            self._rank.start(stand)
            self.resumed_at_chunk = None if saved is None else planner.next_chunk_index
            """The first chunk that is planned anew, where the session goes on with a stream."""
            self.num_held_before = 0 if saved is None else saved.num_held
            """Chunks that the consumer held for good when that stream was saved."""
            if self.is_control_rank:
                if record is not None:
                    opened = _opened(setup, settings, str(model), self.resumed_at_chunk)
                    faults = self._instruments.faults
                    self._recorder = Recorder(
                        record, opened, resume=saved is not None, faults=faults
                    )
                stages = Stages(
                    mesh=self._rank.port(),
                    decoder=codec.streaming_decoder(),
                    memory=memory,
                    noise=SeededNoise(),
                    geometry=geometry,
                    cache=self.cache_spec,
                    past=past,
                )
                self._controller = Controller(
                    planner,
                    stages,
                    max_in_flight=topology.max_in_flight,
                    recorder=self._recorder,
                    instruments=self._instruments,
                    checkpoint=self._checkpoint,
                )
                if saved is not None:
                    self._controller.resume(saved)
                elif self._checkpoint is not None:
                    self._checkpoint.clear()  # last: what is refused before leaves it as it was
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
        """
        if self._controller is None:
            if not self._served:
                self._served = True
                self._rank.serve()
            return iter(())
        if self.resumed_at_chunk is None:
            events = [self._scheduled(event) for event in schedule]
            start = Directive(hard_cut=True, drop_in_flight=True)
            self._controller.inbox.post(start.then(self._directive(prompt, hard_cut=True)))
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
        text = None if prompt is None else Conditioning(prompt, self._text_encoder([prompt]))
        return Directive(
            conditioning=text, transition=transition, hard_cut=hard_cut, recompute=recompute
        )

    def _memory(self, codec: VideoCodec, recompute: Recompute) -> ContextMemory:
        return ContextMemory(
            self.recipe,
            anchor=recompute.anchor,
            encode_anchor=anchor_encoder(codec),
            first_latent_frames=codec.first_latent_frames,
            temporal_stride=codec.temporal_stride,
        )


def instruments_of(config: RuntimeConfig, trace: Trace) -> Instruments:
    """What watches this rank, and the faults that were asked for."""
    faults: Faults = NoFaults()
    if config.faults is not None:
        injected = decode(config.faults)
        faults = InjectedFaults(injected, rank=config.rank, attempt=config.attempt)
    return Instruments(trace=trace, faults=faults, tripwires=config.tripwires)


def _saved(
    checkpoint: Checkpoint, settings: StreamSettings, config: RuntimeConfig, *, resume: bool | None
) -> StreamState | None:
    """The state to go on with. An earlier stream may have left one that nobody asked for: the count
    of starts alone says nothing, where the checkpoint tells who saved it."""
    if resume is None:
        tells_runs = config.world_size > 1 and (config.store_is_hosted or config.run_id is not None)
        resume = checkpoint.is_of_this_run() if tells_runs else config.attempt > 0
    return checkpoint.load(settings) if resume else None


def _identity(setup: RankSetup, settings: StreamSettings) -> dict[str, str | int | float]:
    """What must be the same for a stream to go on; plan and TP degree may differ."""
    return {
        "model": setup.model.fingerprint(),
        "seed": settings.base_seed,
        "height": settings.height,
        "width": settings.width,
        "dtype": str(setup.dtype),
        "kv_cache_attention_bias": settings.kv_cache_attention_bias,
        "recompute_every": settings.recompute_every,
        "recompute_anchor": setup.recompute_anchor,
        "kv_cache": str(setup.cache),
    }


def _opened(
    setup: RankSetup, settings: StreamSettings, model: str, resumed_at_chunk: int | None
) -> Opened:
    """The first record of a recording."""
    return Opened(
        at_s=time.time(),
        package_version=__version__,
        torch_version=str(torch.__version__),
        model=model,
        model_fingerprint=setup.model.fingerprint(),
        plan_id=settings.plan_id,
        tp_degree=setup.topology.tp_degree,
        height=settings.height,
        width=settings.width,
        dtype=NAMES[setup.dtype],
        base_seed=settings.base_seed,
        kv_cache_attention_bias=settings.kv_cache_attention_bias,
        backend=setup.backend.name,
        kv_cache_recompute_every=settings.recompute_every,
        recompute_anchor=setup.recompute_anchor,
        kv_cache=str(setup.cache),
        frames_per_block=settings.recipe.frames_per_block,
        fps=settings.recipe.fps,
        resumed_at_chunk=NOT_RESUMED if resumed_at_chunk is None else resumed_at_chunk,
    )


def choose_cache(recipe: Recipe, kv_cache: str | None, config: RuntimeConfig) -> CacheChoice:
    """The cache that follows from the argument, the environment and the model.

    Raises:
        UserInputError: there is no such kind, or not for this model.
    """
    choice = CacheChoice.named(kv_cache or config.kv_cache or CacheKind.RING)
    recipe.check_cache(choice)
    return choice


def check_inputs(
    *, height: int, width: int, multiple: int, seed: int, kv_cache_attention_bias: float
) -> None:
    """Refuse what no stream can use; `multiple` is the codec's, in pixels.

    Raises:
        UserInputError: naming the argument and a value that works.
    """
    for name, pixels in (("height", height), ("width", width)):
        if pixels < multiple or pixels % multiple:
            raise UserInputError(
                f"--{name} {pixels} is not a positive multiple of {multiple}; "
                f"try {max(multiple, pixels // multiple * multiple)}"
            )
    if not 0 <= seed < 2**63:
        raise UserInputError(f"--seed {seed} is out of range; give a number from 0 to 2^63 - 1")
    if not 0 < kv_cache_attention_bias <= 1:
        raise UserInputError(
            f"--kv-cache-attention-bias {kv_cache_attention_bias} is out of range; "
            f"want 0 < bias <= 1"
        )
