"""A request becomes a job that can run: all that can be refused is refused before a rank starts.

Events sit at chunk boundaries that follow from the request and the model alone, so every plan makes
the same video.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from glob import escape
from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_rt.control.recompute import RecomputeMode
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.placement import Host, device_of
from scope_rt.stream_setup import StreamSetup
from scope_rt.vae.codec import num_frames
from scope_runners.parts import register_parts
from scope_runners.request import StreamRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A stream in chunks. `ignored` are the flags of events after its end, as typed."""

    num_chunks: int
    num_frames: int
    events: tuple[ScheduledEvent, ...]
    ignored: tuple[str, ...]
    later: tuple[ScheduledEvent, ...] = ()
    """The events after the end: whoever resumes the stream may make it longer."""
    has_start_frame: bool = False
    """Whether chunk 0 is a picture that was given."""


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """The files of a stream, beside each other."""

    video: Path
    trace: Path | None
    record: Path | None = None

    @property
    def contact_sheet(self) -> Path:
        return self.video.with_suffix(".png")

    @property
    def summary(self) -> Path:
        return self.video.with_suffix(".json")

    @property
    def snapshot(self) -> Path:
        """The folder of rank0's resume point; there while the stream is not at its end."""
        return self.video.with_name(f".{self.video.name}.snapshot")

    @property
    def is_under_way(self) -> bool:
        """Whether a process makes this video now, or was ended before it was whole."""
        return any(self.video.parent.glob(f".{escape(self.video.name)}.*"))

    @property
    def is_there(self) -> bool:
        """Whether there is this video, or the beginning of it."""
        return self.video.exists() or self.is_under_way

    @property
    def hidden_log(self) -> Path:
        """The stream's log where nobody asked to keep it; there as long as the snapshot."""
        return self.video.with_name(f".{self.video.name}.log")

    @property
    def log(self) -> Path:
        """Where the log of a new stream belongs."""
        return self.hidden_log if self.record is None else self.record


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamJob:
    """A request and what follows from it and its model."""

    request: StreamRequest
    setup: StreamSetup
    timeline: Timeline
    files: OutputFiles


def prepare(request: StreamRequest, environment: LaunchEnvironment | None = None) -> StreamJob:
    """Check a request against its model; touches no other process and writes nothing.

    Raises:
        UserInputError: the request cannot be met; the sentence names what to change.
    """
    if request.config.cache.recompute == RecomputeMode.R0 and not request.accept_quality_loss:
        raise UserInputError(
            "--recompute r0 trades quality for speed; add --accept-quality-loss, or use r0a"
        )
    files = OutputFiles(request.out, request.trace, request.record)
    config = request.config.with_settings(
        log=files.log, snapshot=files.snapshot, record_latents=request.record is not None
    )
    register_parts(request.parts)
    setup = StreamSetup.of(config, environment)
    if setup.environment.rank == 0:
        _check_prompts(request, setup)
    num_latents, sizes = setup.recipe.frames_per_block, setup.codec_sizes
    timeline = place_events(
        request,
        fps=setup.recipe.fps,
        first_frames=num_frames(sizes, num_latents, starts_epoch=True),
        later_frames=num_frames(sizes, num_latents, starts_epoch=False),
        resting_bias=setup.kv_cache_attention_bias,
    )
    timeline = replace(timeline, has_start_frame=setup.geometry.start_frame)
    return StreamJob(request=request, setup=setup, timeline=timeline, files=files)


def transition_of(request: StreamRequest, *, resting_bias: float) -> TransitionSpec | None:
    """How new prompts come in; None is at once."""
    if request.transition == 0:
        return None
    return TransitionSpec(
        num_chunks=request.transition,
        method=Interpolation(request.transition_method),
        bias_floor=resting_bias if request.transition_bias is None else request.transition_bias,
    )


def place_events(
    request: StreamRequest,
    *,
    fps: int,
    first_frames: int,
    later_frames: int,
    resting_bias: float = 1.0,
) -> Timeline:
    """Put every event at the first chunk that starts at its time or later.

    The first chunk of an epoch has `first_frames`, every other `later_frames`.
    """
    epoch_chunk, epoch_frame = 0, 0  # where the newest epoch begins

    def chunks_until(time_s: Fraction) -> int:
        frames = time_s * fps - epoch_frame
        if frames <= 0:
            return epoch_chunk
        return epoch_chunk + 1 + max(0, math.ceil((frames - first_frames) / later_frames))

    cuts, at_chunk = set[int](), dict[Fraction, int]()
    times = {request.seconds, *request.hard_cut_at, *(timed.at_s for timed in request.prompt_at)}
    for time_s in sorted(times):
        index = at_chunk[time_s] = chunks_until(time_s)
        if time_s in request.hard_cut_at:
            cuts.add(index)
            if index > epoch_chunk:
                epoch_frame += first_frames + (index - epoch_chunk - 1) * later_frames
                epoch_chunk = index
    num_chunks = at_chunk[request.seconds]
    prompts = {
        at_chunk[timed.at_s]: timed.prompt
        for timed in sorted(request.prompt_at, key=lambda timed: timed.at_s)
    }
    transition = transition_of(request, resting_bias=resting_bias)
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
    num_epochs = 1 + sum(0 < index < num_chunks for index in cuts)
    return Timeline(
        num_chunks=num_chunks,
        num_frames=num_epochs * first_frames + (num_chunks - num_epochs) * later_frames,
        events=tuple(event for event in events if event.chunk_index < num_chunks),
        ignored=tuple(flag for flag, at_s in ignored if at_chunk[at_s] >= num_chunks),
        later=tuple(event for event in events if event.chunk_index >= num_chunks),
    )


def check_machine(job: StreamJob, *, num_cores: int, num_gpus: int) -> None:
    """Refuse more ranks than cores, where nobody asked for it, and more that generate than GPUs.

    Raises:
        UserInputError: naming what to change.
    """
    topology = job.setup.topology
    num_ranks = topology.world_size
    needs = f"plan {topology.plan_id} with tp {topology.tp_degree} starts {num_ranks} processes"
    if num_ranks > num_cores and not job.request.oversubscribe:
        raise UserInputError(
            f"{needs}, this machine has {num_cores} CPU cores; add --oversubscribe to share them"
        )
    if num_gpus:  # on the CPU all are alike
        host = Host(first_rank=0, num_ranks=num_ranks, num_gpus=num_gpus)
        control_device = job.setup.config.mesh.control_device
        for rank in range(num_ranks):
            device_of(rank, topology, host, control_device=control_device)


def available_cores() -> int:
    """CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_prompts(request: StreamRequest, setup: StreamSetup) -> None:
    for flag, prompt in _prompts(request):
        try:
            setup.check_prompt(prompt)
        except UserInputError as error:
            raise UserInputError(f"{flag}: {str(error).removeprefix('prompt: ')}") from None


def _prompts(request: StreamRequest) -> Iterator[tuple[str, str]]:
    yield "--prompt", request.prompt
    for timed in request.prompt_at:
        yield f"--prompt-at {_seconds(timed.at_s)}", timed.prompt


def _seconds(time_s: Fraction) -> str:
    return f"{float(time_s):g}s"
