"""A request becomes a job that can run: all that can be refused is refused before a rank starts.

Events sit at chunk boundaries that follow from the request and the model alone, so every plan makes
the same video.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from scope_contracts.cache_spec import CacheChoice
from scope_contracts.errors import UserInputError
from scope_rt.config import RuntimeConfig
from scope_rt.control.recompute import RecomputeMode
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.mesh.topology import Topology
from scope_rt.models.recipe import Recipe
from scope_rt.models.shards import check_degree
from scope_rt.output_file import claim
from scope_rt.session import ScheduledEvent
from scope_rt.stream_setup import StreamSetup
from scope_rt.text.encoder import TextEncoder
from scope_rt.video.writer import check_recordable
from scope_runners.request import StreamRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A stream in chunks. `ignored` are the flags of events after its end, as typed."""

    num_chunks: int
    frames_per_chunk: int
    events: tuple[ScheduledEvent, ...]
    ignored: tuple[str, ...]
    later: tuple[ScheduledEvent, ...] = ()
    """The events after the end: whoever goes on with the stream may make it longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamJob:
    """A request and what follows from it. Sizes in pixels."""

    request: StreamRequest
    topology: Topology
    recipe: Recipe
    cache: CacheChoice
    timeline: Timeline
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """The files of a stream, beside each other."""

    video: Path
    trace: Path | None

    @property
    def contact_sheet(self) -> Path:
        return self.video.with_suffix(".png")

    @property
    def summary(self) -> Path:
        return self.video.with_suffix(".json")

    @property
    def checkpoint(self) -> Path:
        """Where rank0 saves the stream; there while it is not at its end."""
        return self.video.with_name(f".{self.video.name}.checkpoint")

    @property
    def journal(self) -> Path:
        """What rank0 has shown so far; there as long as the checkpoint."""
        return self.video.with_name(f".{self.video.name}.journal")


def prepare(request: StreamRequest, config: RuntimeConfig) -> StreamJob:
    """Check a request against its model; touches no other process and writes nothing.

    Raises:
        UserInputError: the request cannot be met; the sentence names the flag to change.
    """
    topology = _topology(request, config)
    if request.recompute == RecomputeMode.R0 and not request.accept_quality_loss:
        raise UserInputError(
            "--recompute r0 trades quality for speed; add --accept-quality-loss, or use r0a"
        )
    setup = StreamSetup.of(
        request.model,
        topology=topology,
        config=config,
        seed=request.seed,
        height=request.height,
        width=request.width,
        kv_cache_attention_bias=request.kv_cache_attention_bias,
        kv_cache=request.kv_cache,
        recompute=request.recompute,
    )
    _check_prompts(request, setup.text_encoder)
    if request.fallback_tp is not None:
        fallback = Topology(plan_id=request.plan, tp_degree=request.fallback_tp)
        check_degree(setup.rank.model.config, fallback.tp_degree)
    recipe = setup.recipe
    return StreamJob(
        request=request,
        topology=topology,
        recipe=recipe,
        cache=setup.rank.cache,
        timeline=place_events(
            request,
            fps=recipe.fps,
            frames_per_chunk=setup.codec.temporal_stride * recipe.frames_per_block,
        ),
        height=setup.settings.height,
        width=setup.settings.width,
    )


def degree_of(request: StreamRequest, attempt: int) -> int:
    """The TP degree of an attempt: after a loss it may be another."""
    if attempt > 0 and request.fallback_tp is not None:
        return request.fallback_tp
    return request.tp_degree


def _topology(request: StreamRequest, config: RuntimeConfig) -> Topology:
    """The topology of this attempt; a launcher that starts as many ranks as ever knows no other."""
    topology = Topology(plan_id=request.plan, tp_degree=degree_of(request, config.attempt))
    if config.launched and topology.world_size != config.world_size:
        return Topology(plan_id=request.plan, tp_degree=request.tp_degree)
    return topology


def transition_of(request: StreamRequest) -> TransitionSpec | None:
    """How new prompts come in; None is at once."""
    if request.transition == 0:
        return None
    resting = request.kv_cache_attention_bias
    return TransitionSpec(
        num_chunks=request.transition,
        method=Interpolation(request.transition_method),
        bias_floor=resting if request.transition_bias is None else request.transition_bias,
    )


def place_events(request: StreamRequest, *, fps: int, frames_per_chunk: int) -> Timeline:
    """Put every event at the first chunk that starts at its time or later."""

    def chunks_until(time_s: Fraction) -> int:
        return math.ceil(time_s * fps / frames_per_chunk)

    num_chunks = chunks_until(request.seconds)
    prompts = {
        chunks_until(timed.at_s): timed.prompt
        for timed in sorted(request.prompt_at, key=lambda timed: timed.at_s)
    }
    cuts = {chunks_until(at_s) for at_s in request.hard_cut_at}
    transition = transition_of(request)
    events = [
        ScheduledEvent(
            chunk_index=index,
            prompt=prompts.get(index),
            transition=transition if index in prompts and index not in cuts else None,
            hard_cut=index in cuts,
        )
        for index in sorted(prompts.keys() | cuts)
    ]
    ignored = [(f"--prompt-at {_seconds(timed.at_s)}", timed.at_s) for timed in request.prompt_at]
    ignored += [(f"--hard-cut-at {_seconds(at_s)}", at_s) for at_s in request.hard_cut_at]
    return Timeline(
        num_chunks=num_chunks,
        frames_per_chunk=frames_per_chunk,
        events=tuple(event for event in events if event.chunk_index < num_chunks),
        ignored=tuple(flag for flag, at_s in ignored if chunks_until(at_s) >= num_chunks),
        later=tuple(event for event in events if event.chunk_index >= num_chunks),
    )


def check_outputs(job: StreamJob) -> OutputFiles:
    """The files the stream will write, each of which can be written; leaves none behind.

    Raises:
        UserInputError: a name, folder or picture size cannot be used.
    """
    files = OutputFiles(job.request.out, job.request.trace)
    if files.trace is not None and files.trace.resolve() == files.summary.resolve():
        raise UserInputError(
            f"--trace {files.trace} is where the summary of --out goes; choose another name"
        )
    check_recordable(files.video, width=job.width, height=job.height, fps=job.recipe.fps)
    claim(files.contact_sheet, suffixes=(".png",)).unlink()
    for path in (files.summary, files.trace):
        if path is not None:
            claim(path, suffixes=(".json",)).unlink()
    if job.request.record is not None:
        claim(job.request.record, suffixes=(".scope",)).unlink()
    return files


def check_machine(job: StreamJob, *, num_cores: int, num_gpus: int) -> None:
    """Refuse more ranks than cores, where nobody asked for it, and more ranks than GPUs.

    Raises:
        UserInputError: naming what to change.
    """
    plan, num_ranks = job.topology.plan_id, job.topology.world_size
    needs = f"--plan {plan} with --tp {job.topology.tp_degree} starts {num_ranks} processes"
    if num_ranks > num_cores and not job.request.oversubscribe:
        raise UserInputError(
            f"{needs}, this machine has {num_cores} CPU cores; add --oversubscribe to share them"
        )
    if 0 < num_gpus < num_ranks:
        raise UserInputError(
            f"{needs}, this machine has {num_gpus} GPUs; set CUDA_VISIBLE_DEVICES= to use the CPU"
        )


def available_cores() -> int:
    """CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_prompts(request: StreamRequest, text_encoder: TextEncoder) -> None:
    for flag, prompt in _prompts(request):
        try:
            text_encoder([prompt])
        except UserInputError as error:
            raise UserInputError(f"{flag}: {str(error).removeprefix('prompt: ')}") from None


def _prompts(request: StreamRequest) -> Iterator[tuple[str, str]]:
    yield "--prompt", request.prompt
    for timed in request.prompt_at:
        yield f"--prompt-at {_seconds(timed.at_s)}", timed.prompt


def _seconds(time_s: Fraction) -> str:
    return f"{float(time_s):g}s"
