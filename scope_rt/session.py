"""The whole runtime behind one object: `for chunk in StreamSession("tiny").stream(prompt)`.

Every rank of a plan runs the same lines; on mesh ranks `stream` serves rank0 and yields nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError
from scope_rt.config import RECOMPUTE_NEVER, RuntimeConfig
from scope_rt.control.controller import Chunk, Controller
from scope_rt.control.inbox import Conditioning, Directive, ScheduledDirective
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.mesh.process_group import leave_world
from scope_rt.mesh.rank import Rank, RankSetup
from scope_rt.mesh.topology import RUNNABLE, Topology
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.models.noise import SeededNoise
from scope_rt.models.shards import check_degree
from scope_rt.streaming.trace import NullTrace, Span, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledEvent:
    """A prompt change, a hard cut, or both, at the first chunk from `chunk_index` on."""

    chunk_index: int
    prompt: str | None = None
    hard_cut: bool = False


class StreamSession:
    """A stream of one model under one plan.

    Args:
        model: a model folder, or "tiny" for the embedded model.
        plan: `single`, `tp_v1_1`, `pp0` or `pp1`; all but `single` need one process per rank
            (`scope-rt stream` starts them, or torchrun does).
        tp: tensor-parallel degree of the generator group.
        seed: base seed; equal seeds, prompts and schedules give equal streams.
        height, width: pixels; the model's own size where not given.
        dtype: of weights, cache and latents.
        trace: where stages are recorded.

    Raises:
        UserInputError: an argument cannot be used; the sentence says what to change.
        ParityError: ranks were started with different settings.
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
        trace: Trace | None = None,
        config: RuntimeConfig | None = None,
    ) -> None:
        self._trace: Trace = trace or NullTrace()
        config = config or RuntimeConfig.from_environment()
        folder = ModelFolder.open(model)
        self.recipe = folder.recipe
        height = self.recipe.default_height if height is None else height
        width = self.recipe.default_width if width is None else width
        topology = Topology(plan_id=_plan_named(plan), tp_degree=tp)
        check_degree(folder.config, tp)
        check_environment(config, topology)
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
            model=folder, topology=topology, config=config, dtype=dtype, height=height, width=width
        )
        self.cache_bytes = setup.cache_spec(geometry).num_bytes(topology.tp_degree)
        self.is_control_rank = config.rank == 0
        self._rank = Rank(setup, geometry, self._trace)
        self._controller: Controller | None = None
        self._served = False
        self._spans: tuple[Span, ...] | None = None
        if self.is_control_rank:
            settings = StreamSettings(
                plan_id=topology.plan_id,
                recipe=folder.recipe,
                height=height,
                width=width,
                base_seed=seed,
                kv_cache_attention_bias=kv_cache_attention_bias,
            )
            self._controller = Controller(
                planner=Planner(settings=settings),
                mesh=self._rank.port(),
                decoder=codec.streaming_decoder(),
                geometry=geometry,
                noise=SeededNoise(),
                trace=self._trace,
                max_in_flight=topology.max_in_flight,
            )

    def stream(
        self,
        prompt: str,
        *,
        num_chunks: int | None = None,
        schedule: Sequence[ScheduledEvent] = (),
    ) -> Iterator[Chunk]:
        """Start an epoch with `prompt` and yield its chunks, without end by default.

        Scheduled chunk indices count from the start of the session. On a mesh rank this serves
        rank0 until the session there is closed, and yields nothing.

        Raises:
            UserInputError: a prompt cannot be read; nothing was started.
        """
        if self._controller is None:
            if not self._served:
                self._served = True
                self._rank.serve()
            return iter(())
        events = [
            ScheduledDirective(
                chunk_index=event.chunk_index,
                directive=self._directive(event.prompt, hard_cut=event.hard_cut),
            )
            for event in schedule
        ]
        start = Directive(hard_cut=True, drop_in_flight=True)
        self._controller.inbox.post(start.then(self._directive(prompt, hard_cut=True)))
        self._controller.inbox.schedule(events)
        return self._controller.run(num_chunks)

    def prompt(self, text: str) -> None:
        """Change the prompt at the next chunk that is planned; the chunk names it.

        Raises:
            UserInputError: the prompt cannot be read; the stream goes on with the old one.
        """
        self._post(self._directive(text, hard_cut=False))

    def hard_cut(self) -> None:
        """Start a new epoch at the next chunk that is planned; older chunks are dropped."""
        self._post(Directive(hard_cut=True, drop_in_flight=True))

    def close(self) -> tuple[Span, ...]:
        """End the stream on all ranks; returns the spans of every rank. Idempotent.

        After a failure in the middle of a chunk there is nobody to say goodbye to: this rank
        leaves, which is what tells the others, and its own spans are returned.
        """
        if self._spans is None:
            if self._controller is not None and self._controller.is_midway:
                self._spans = self._trace.spans
            else:
                self._spans = self._end_together()
            leave_world()
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
        if error is None or self.is_control_rank:
            self.close()
        else:
            leave_world()

    def _post(self, directive: Directive) -> None:
        if self._controller is None:
            raise UserInputError("only rank0 takes control input; call this where rank is 0")
        self._controller.inbox.post(directive)

    def _directive(self, prompt: str | None, *, hard_cut: bool) -> Directive:
        if prompt is None:
            return Directive(hard_cut=hard_cut)
        conditioning = Conditioning(prompt, self._text_encoder([prompt]))
        return Directive(conditioning=conditioning, hard_cut=hard_cut)


def _plan_named(plan: str) -> PlanId:
    try:
        return PlanId(plan)
    except ValueError:
        choices = ", ".join(RUNNABLE)
        raise UserInputError(f"--plan {plan!r} is unknown; choose one of {choices}") from None


def check_environment(config: RuntimeConfig, topology: Topology) -> None:
    """Refuse environment variables that ask for another plan than the arguments do.

    Raises:
        UserInputError: naming the variable.
    """
    if config.tp_plan not in (None, topology.plan_id):
        raise UserInputError(
            f"SCOPE_TP_PLAN is {config.tp_plan!r}, --plan is {topology.plan_id}; unset the variable"
        )
    if config.pp_enabled not in (None, topology.pipelined):
        raise UserInputError(
            f"SCOPE_PP_ENABLED contradicts --plan {topology.plan_id}; unset the variable"
        )
    if config.kv_cache_recompute_every != RECOMPUTE_NEVER or config.tp_allow_compile:
        raise UserInputError(
            "SCOPE_KV_CACHE_RECOMPUTE_EVERY and SCOPE_TP_ALLOW_COMPILE are not supported yet; "
            "unset them"
        )


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
