"""`scope-rt replay`: a recorded stream is run again, and the two are compared chunk by chunk.

At the recorded TP degree the latents must be equal to the last bit, whatever the plan. At another
degree, which sums in another order, they must be within 1e-4 (fp32 only); there every chunk is
given the recorded latents as its past, because a stream that feeds on its own result would let
rounding grow. The replay records itself, and the two files are compared.
"""

import argparse
import json
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import torch
from torch import Tensor

from scope_contracts.errors import ScopeError, UserInputError
from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Control, Opened
from scope_contracts.tensor_spec import DType
from scope_rt.config import RECOMPUTE_NEVER, StreamConfig
from scope_rt.control.log_entries import recorded_bias, recorded_seed, recorded_transition
from scope_rt.control.recompute import RecomputeAnchor, RecomputeMode
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.start_frame import StartFrame
from scope_rt.instruments import Instruments
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.models.feedback import Feedback, own_latents
from scope_rt.models.loading import ModelFolder
from scope_rt.models.recipe import RECIPE_NAME, Recipe
from scope_rt.placement import Host, device_of
from scope_rt.record.reader import StreamHistory, open_log
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_rt.tensors import TORCH_DTYPES
from scope_rt.topology import RUNNABLE, Topology
from scope_runners import logs
from scope_runners.arguments import one_of, positive
from scope_runners.command_parser import CommandParser
from scope_runners.exit_codes import FAILED
from scope_runners.launcher import launch
from scope_runners.parts import add_parts_argument, register_parts
from scope_runners.progress import progress_bar
from scope_runners.rank_process import guarded_rank, rank_watchdog
from scope_runners.recording_argument import Recording, read_recording
from scope_runners.replay_report import compare, table
from scope_runners.replayable import num_before_lost_state, num_before_pictures, num_recorded

_LOG = logging.getLogger(__name__)
TOLERANCE = 1e-4
"""What another order of sums may move in fp32, at another TP degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """A recording, and how it is run again."""

    recording: Recording
    events: tuple[ScheduledEvent, ...]
    model: str
    family: str | None
    """As `ModelConfig.recipe`."""
    recipe: Recipe
    topology: Topology
    num_chunks: int
    tolerance: float
    """0 wants equal bits."""
    start_frame: StartFrame | None
    """As recorded; None where the stream began with noise, or its start frame was never shown."""


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt replay`."""
    add = parser.add_argument
    add("recording", type=Path, metavar="FILE", help="what --record wrote")
    add("--plan", type=one_of(RUNNABLE), help="another plan than the recorded one")
    add("--tp", type=positive, help="another TP degree than the recorded one")
    add("--model", metavar="FOLDER", help="where the recorded model is now, if it was moved")
    add("--recipe", metavar="NAME", help="in place of the recorded one")
    add_parts_argument(parser)
    add(
        "--tolerance",
        type=_tolerance,
        metavar="DIFF",
        help="largest difference of latents allowed (default: 0, equal bits, at the recorded TP "
        f"degree, else {TOLERANCE})",
    )
    add("--record", type=Path, metavar="FILE", help="keep the replay's own recording in a new file")
    add("--threads", type=positive, default=1, help="CPU threads of every rank (default 1)")
    add("--json", action="store_true", help="print one JSON object")


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0, such as 1e-3")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Replay as one rank, or start the ranks; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)

    def run() -> int:
        parser = CommandParser(prog="scope-rt replay", description=__doc__)
        add_replay_arguments(parser)
        return run_replay(parser.parse_args(arguments), arguments)

    return guarded_rank(run)


def run_replay(namespace: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run this process's part of a replay, or start the ranks it needs with `argv`.

    Raises:
        UserInputError: the recording cannot be replayed so; the sentence says what to change.
        ScopeError: the replay failed.
    """
    logs.set_up(stream=namespace.recording.name)
    environment = LaunchEnvironment.from_environment()
    job = prepare(namespace, environment)
    if environment.rank == 0 and namespace.record is not None and namespace.record.exists():
        raise UserInputError(f"--record {namespace.record} is there already; choose another name")
    if not environment.launched and job.topology.world_size > 1:
        ranks, num_gpus = job.topology.world_size, torch.cuda.device_count()
        if num_gpus:
            host = Host(first_rank=0, num_ranks=ranks, num_gpus=num_gpus)
            device_of(ranks - 1, job.topology, host)  # where the last one would be, or a sentence
        return launch("scope_runners.replay", argv, num_ranks=ranks, threads=namespace.threads)
    torch.set_num_threads(namespace.threads)
    job.topology.check_world_size(environment.world_size)
    if environment.rank != 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _run_again(job, record=None, show=False)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with TemporaryDirectory(prefix="scope-replay-") as folder:
        record = namespace.record or Path(folder) / "replay.scope"
        _run_again(job, record=record, show=not namespace.json)
        report = compare(job.recording, record, num_chunks=job.num_chunks, tolerance=job.tolerance)
    print(json.dumps(asdict(report), indent=2) if namespace.json else table(report), flush=True)
    if job.recording.damage:
        raise job.recording.damage
    return 0 if report.passed else FAILED


def prepare(namespace: argparse.Namespace, environment: LaunchEnvironment) -> ReplayJob:
    """Read a recording and check that it can be run again here.

    Gigabytes of latents are checked once, by the process that will compare them; launcher and mesh
    ranks do what the records say.

    Raises:
        UserInputError: it cannot; the sentence says what to change.
        ContractError: it is damaged before its first chunk.
    """
    recording = read_recording(namespace.recording, check_blobs=False)
    register_parts(namespace.parts)
    opened = recording.stream.opened
    given = opened.model if namespace.model is None else namespace.model
    # A recipe of the model's own stands in its folder, wherever that is now.
    recorded = None if opened.recipe == RECIPE_NAME else opened.recipe
    family = namespace.recipe or recorded
    model = ModelFolder.open(given, family)
    fingerprint = model.fingerprint()
    if fingerprint != opened.model_fingerprint:
        raise UserInputError(
            f"the model {given!r} is not the recorded one: its fingerprint is {fingerprint[:12]}, "
            f"recorded was {opened.model_fingerprint[:12]}; name the recorded one with --model, "
            "and with --recipe where the stream was given one"
        )
    topology = Topology(
        plan_id=opened.plan_id if namespace.plan is None else namespace.plan,
        tp_degree=opened.tp_degree if namespace.tp is None else namespace.tp,
    )
    # Of the records alone: all ranks must come to the same.
    same_degree = {each.tp_degree for each in recording.stream.openings} == {topology.tp_degree}
    is_comparing = environment.rank == 0 and environment.world_size == topology.world_size
    if is_comparing:
        recording = read_recording(namespace.recording)
    stream = recording.stream
    num_chunks = num_recorded(stream)
    if num_chunks == 0 and recording.damage:
        raise recording.damage
    if num_chunks == 0 and any(done.latents is None for done in stream.finished.values()):
        raise UserInputError(
            f"{namespace.recording} holds no latents to compare with; replay one that "
            "scope-rt stream --record wrote"
        )
    if num_chunks == 0:
        raise UserInputError(
            f"the recording {namespace.recording} has no finished chunk of the stream's first "
            "start, so there is nothing to compare; record a longer stream"
        )
    lost_at = num_before_lost_state(stream, model.recipe)
    if lost_at is not None and lost_at < num_chunks:
        num_chunks = lost_at
        if is_comparing:
            _LOG.warning(
                "ranks made chunk %d after a restart, without what ranks of one run still have; "
                "compared are the chunks before it",
                lost_at,
            )
    pictures_at = num_before_pictures(stream)
    if pictures_at == 0:
        raise UserInputError(
            f"the recording {namespace.recording} began with video input, which is not recorded: "
            "it cannot be replayed"
        )
    if pictures_at is not None and pictures_at < num_chunks:
        num_chunks = pictures_at
        if is_comparing:
            _LOG.warning(
                "chunk %d began with video input, which is not recorded; compared are the chunks "
                "before it",
                pictures_at,
            )
    if not same_degree and opened.dtype is not DType.FLOAT32:
        raise UserInputError(
            f"the recording is in {opened.dtype}, in which TP degrees differ by too much to be "
            f"compared; replay it with --tp {opened.tp_degree}"
        )
    bar = 0.0 if same_degree else TOLERANCE
    return ReplayJob(
        recording=recording,
        events=events(stream),
        model=given,
        family=family,
        recipe=model.recipe,
        topology=topology,
        num_chunks=num_chunks,
        tolerance=bar if namespace.tolerance is None else namespace.tolerance,
        start_frame=_start_frame(recording),
    )


def _start_frame(recording: Recording) -> StartFrame | None:
    """The latents of chunk 0 are those of its picture, which nobody needs to have any more."""
    told, place = recording.stream.start_frame, recording.places.get(0)
    if told is None or place is None:
        return None
    with open_log(recording.path) as file:
        latents = _latents_at(recording, LogReader(file), 0)
    return StartFrame(
        image=told.image,
        image_sha256=told.image_sha256,
        latents=latents[None],
        latents_sha256=recording.stream.finished[0].latents_sha256,
    )


def _latents_at(recording: Recording, reader: LogReader, chunk: int) -> Tensor:
    """Recorded latents `[F, C, H/8, W/8]`."""
    spec = recording.stream.finished[chunk].latents
    assert spec is not None, "a log without latents is not replayed"
    raw = bytearray(reader.blob(recording.places[chunk]))
    return torch.frombuffer(raw, dtype=TORCH_DTYPES[spec.dtype]).view(spec.shape)


def events(stream: StreamHistory) -> tuple[ScheduledEvent, ...]:
    """What was asked for, and what a restart did in its place, at the recorded chunks.

    Raises:
        FieldError: a transition that no version of this package makes.
    """
    asked = [_event(control) for control in stream.controls]
    for restart in stream.restarts:
        envelope = stream.envelopes.get(restart.chunk_index)
        if envelope is not None:
            asked.append(
                ScheduledEvent(
                    chunk_index=envelope.chunk_index,
                    hard_cut=envelope.init_cache,
                    recompute=envelope.do_kv_recompute,
                )
            )
    return tuple(asked)


def _run_again(job: ReplayJob, *, record: Path | None, show: bool) -> None:
    """One rank's part of the stream, from its beginning to the last chunk to compare."""
    with _feedback(job) as feedback:
        setup = StreamSetup.of(_config(job, record), recorded_start=job.start_frame)
        session = StreamSession(
            setup,
            instruments=Instruments(watchdog=rank_watchdog()),
            feedback=feedback,
        )
        prompts = [event.prompt for event in job.events if event.chunk_index == 0 and event.prompt]
        with session:
            chunks = session.stream(
                prompts[-1] if prompts else "",
                num_chunks=job.num_chunks,
                schedule=[event for event in job.events if event.chunk_index > 0],
            )
            num_frames = sum(
                finished.num_frames for finished in job.recording.stream.finished.values()
            )
            with progress_bar(num_frames, enabled=show) as advance:
                for chunk in chunks:
                    advance(chunk)
    if session.log.failure is not None:
        raise ScopeError(session.log.failure)


def _config(job: ReplayJob, record: Path | None) -> StreamConfig:
    """The recorded configuration, on the ranks of this replay."""
    opened = job.recording.stream.opened
    mode, every = _recompute(opened, job.recipe)
    return StreamConfig.load(
        model=job.model,
        recipe=job.family,
        plan=job.topology.plan_id,
        tp=job.topology.tp_degree,
        seed=opened.base_seed,
        height=opened.height,
        width=opened.width,
        dtype=opened.dtype,
        codec_dtype=opened.codec_dtype,
        text_dtype=opened.text_dtype,
        kv_cache_attention_bias=opened.kv_cache_attention_bias,
        kv_cache=opened.kv_cache,
        recompute=mode,
        attention_backend=opened.backend,
    ).with_settings(kv_cache_recompute_every=every, log=record, record_latents=True)


@contextmanager
def _feedback(job: ReplayJob) -> Iterator[Feedback]:
    """What later chunks are told of a chunk: the truth, where equal bits are wanted."""
    if not job.tolerance:
        yield own_latents
        return
    with open_log(job.recording.path) as file:
        yield RecordedFeedback(job.recording, file)


class RecordedFeedback:
    """Tells later chunks what a recording has of a chunk, so that rounding cannot grow."""

    def __init__(self, recording: Recording, file: BinaryIO) -> None:
        self._recording, self._reader = recording, LogReader(file)

    def __call__(self, chunk_index: int, latents_BFCHW: Tensor) -> Tensor:
        if chunk_index not in self._recording.places:
            return latents_BFCHW  # dropped by a cut: nothing after it sees it
        recorded = _latents_at(self._recording, self._reader, chunk_index)
        return recorded.view_as(latents_BFCHW).to(latents_BFCHW)


def _recompute(opened: Opened, recipe: Recipe) -> tuple[str | None, int | None]:
    """The arguments that choose what was in effect."""
    if recipe.clean_pass:
        return None, None
    if opened.kv_cache_recompute_every == RECOMPUTE_NEVER:
        return RecomputeMode.R1, None
    is_latent = opened.recompute_anchor == RecomputeAnchor.LATENT
    mode = RecomputeMode.R0 if is_latent else RecomputeMode.R0A
    return mode, opened.kv_cache_recompute_every


def _event(control: Control) -> ScheduledEvent:
    return ScheduledEvent(
        chunk_index=control.chunk_index,
        prompt=control.prompt if control.embeds_sha256 else None,
        transition=recorded_transition(control),
        hard_cut=control.hard_cut,
        recompute=control.recompute,
        bias=recorded_bias(control),
        seed=recorded_seed(control),
    )


if __name__ == "__main__":
    raise SystemExit(main())
