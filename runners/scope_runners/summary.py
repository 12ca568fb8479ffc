"""What a stream was and what it cost, complete enough for anyone to compare two runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.retraction import Retraction
from scope_rt import output_file
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.file_digest import FileDigest
from scope_rt.models.recipe import RECIPE_NAME
from scope_rt.version import __version__
from scope_runners.chunk_record import GENERATE, ChunkRecord
from scope_runners.job import OutputFiles, StreamJob
from scope_runners.timings import StageSummary, StageTimings
from scope_runners.verify import sealed
from scope_runners.wording import counted, retracted_chunks

_MEBIBYTE = 2**20
_WRITTEN_ONCE = ("contact_sheet", "trace")
"""Files beside the video and its summary; a recording has checksums of its own."""


class Ending(StrEnum):
    """Why a stream ended."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """When rank0 reached what, in seconds of one monotonic clock."""

    started_s: float
    """After imports."""
    ready_s: float
    """The session was ready: model loaded, ranks met."""
    first_frame_s: float
    written_s: float
    """The last frame was encoded."""
    num_frames: int
    """Frames made in this time; an earlier process may have made more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFrame:
    """Seconds to the first frame."""

    since_start_s: float
    """From where rank0's process had imported what it runs."""
    since_ready_s: float
    """From where the model was loaded and the ranks had met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Frames per second; `realtime_ratio` is end to end over the stream's own rate."""

    denoise: float
    end_to_end: float
    realtime_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFill:
    """The cache at the end, in latent frames, and the bytes a generator rank holds for it."""

    kind: str
    """As `--kv-cache` takes it."""

    visible_frames: int
    capacity_frames: int
    bytes_per_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the stream."""

    chunks: int
    frames: int
    video_s: float
    epochs: int
    generator_calls: int
    restarts: int
    """How often the ranks were started again under the stream."""
    retracted: int
    """Chunks that were shown and may have been wrong."""
    unverified: int
    """Chunks made since all state of a rank was verified that was lost then: nobody can tell any
    more what it held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSummary:
    """One stream; the field names are the keys of its JSON."""

    version: str
    ending: Ending
    plan: str
    tp: int
    ranks: int
    threads: int
    seed: int
    model: str
    recipe: str
    """As `--recipe` takes it, or `recipe.json` for the model's own."""
    dtype: str
    codec_dtype: str
    text_dtype: str
    integrity: str
    """How much was verified of what was computed, as `--integrity` takes it."""
    height: int
    width: int
    fps: int
    kv_cache_attention_bias: float
    prompt: str
    image: str | None
    """The picture that the stream begins with."""
    events: Sequence[ScheduledEvent]
    ignored_events: Sequence[str]
    totals: Totals
    first_frame: FirstFrame
    frames_per_s: Speed
    writer_blocked_s: float
    recording_failure: str | None
    """Why the stream log ended early, or holds no latents from a chunk on, if that is so."""
    broken_on_purpose: str | None
    """Which faults were injected and which checks were off, if any."""
    retractions: Sequence[Retraction]
    """What was shown and may have been wrong. The video has none of it, but what `chunks` says is
    suspect: where the stream was resumed, the chunks were made again in their place."""
    stages: Mapping[str, StageSummary]
    cache: CacheFill
    files: Mapping[str, str]
    digests: Mapping[str, FileDigest]
    """Of those files that are never written again, by the same names."""
    chunks: Sequence[ChunkRecord]

    def to_json(self) -> str:
        """With a `checksum` of all it says."""
        return json.dumps(sealed(asdict(self)), indent=2)

    def with_digests(self, video: FileDigest) -> "StreamSummary":
        """The same of a stream whose files are all written. Raises `OSError`."""
        paths = {kind: Path(path) for kind, path in self.files.items() if kind in _WRITTEN_ONCE}
        others = {kind: FileDigest.of(path) for kind, path in paths.items()}
        return replace(self, digests={"video": video, **others})

    def write(self, path: Path) -> None:
        """Write the JSON to `path`, whole or not at all."""
        with output_file.replacing(path, suffixes=(".json",)) as partial:
            partial.write_text(self.to_json() + "\n")


def summarise(
    job: StreamJob,
    chunks: Sequence[ChunkRecord],
    *,
    ending: Ending,
    moments: Moments,
    cache_spec: KVCacheSpec,
    blocked_s: float,
    restarts: int,
    recording_failure: str | None,
    broken_on_purpose: str,
    retractions: Sequence[Retraction],
    num_unverified: int,
    files: OutputFiles,
) -> StreamSummary:
    """The summary of a stream of at least one chunk."""
    request, setup, config = job.request, job.setup, job.setup.config
    fps = setup.recipe.fps
    timings = StageTimings()
    for chunk in chunks:
        for stage, elapsed_ms in chunk.stage_ms.items():
            timings.add(stage, elapsed_ms)
    stages = timings.summary()
    num_frames = sum(chunk.frames for chunk in chunks)
    end_to_end = moments.num_frames / (moments.written_s - moments.ready_s)
    paths = {"video": files.video, "contact_sheet": files.contact_sheet, "summary": files.summary}
    if files.trace is not None:
        paths["trace"] = files.trace
    if request.record is not None:
        paths["recording"] = request.record
    return StreamSummary(
        version=__version__,
        ending=ending,
        plan=setup.topology.plan_id,
        tp=setup.topology.tp_degree,
        ranks=setup.topology.world_size,
        threads=request.threads,
        seed=config.sampling.seed,
        model=config.model.folder,
        recipe=setup.model.layout.family.name,
        dtype=setup.dtype_name,
        codec_dtype=setup.codec_dtype,
        text_dtype=setup.text_dtype,
        integrity=config.integrity.level,
        height=setup.height,
        width=setup.width,
        fps=fps,
        kv_cache_attention_bias=setup.kv_cache_attention_bias,
        prompt=request.prompt,
        image=None if config.sampling.image is None else str(config.sampling.image),
        events=job.timeline.events,
        ignored_events=job.timeline.ignored,
        totals=Totals(
            chunks=len(chunks),
            frames=num_frames,
            video_s=num_frames / fps,
            epochs=len({chunk.cache_epoch for chunk in chunks}),
            generator_calls=sum(chunk.generator_calls for chunk in chunks),
            restarts=restarts,
            retracted=sum(each.last_chunk - each.first_chunk + 1 for each in retractions),
            unverified=num_unverified,
        ),
        first_frame=FirstFrame(
            since_start_s=moments.first_frame_s - moments.started_s,
            since_ready_s=moments.first_frame_s - moments.ready_s,
        ),
        frames_per_s=Speed(
            denoise=num_frames / stages[GENERATE].total_ms * 1e3,
            end_to_end=end_to_end,
            realtime_ratio=end_to_end / fps,
        ),
        writer_blocked_s=blocked_s,
        recording_failure=recording_failure,
        broken_on_purpose=broken_on_purpose or None,
        retractions=retractions,
        stages=stages,
        cache=_cache_fill(job, chunks, cache_spec),
        files={kind: str(path) for kind, path in paths.items()},
        digests={},
        chunks=[chunk.judged(retractions) for chunk in chunks],
    )


def table(summary: StreamSummary) -> str:
    """The summary for a person at a terminal."""
    totals, speed, cache = summary.totals, summary.frames_per_s, summary.cache
    first, fps = summary.first_frame, summary.fps
    rows = {
        "stream": f"{summary.plan}, tp {summary.tp}, seed {summary.seed}, model {summary.model}, "
        f"{summary.dtype}, {summary.width}x{summary.height} at {fps} frames/s",
        "recipe": f"{_recipe(summary)}; codec {summary.codec_dtype}, "
        f"text encoder {summary.text_dtype}",
        "made": f"{counted(totals.chunks, 'chunk')}, {counted(totals.frames, 'frame')}, "
        f"{totals.video_s:.1f} s of video, {counted(totals.epochs, 'epoch')}, "
        f"{counted(totals.restarts, 'restart')} ({summary.ending})",
        "first frame": f"{first.since_start_s:.2f} s after Python had loaded the program, "
        f"{first.since_ready_s:.2f} s after the session was ready",
        "frames/s": f"{speed.denoise:.1f} denoise only, {speed.end_to_end:.1f} end to end: "
        f"{speed.realtime_ratio:.2f}x the stream's own {fps}",
        "cache": f"{cache.kind}, {cache.visible_frames} of {cache.capacity_frames} latent frames "
        f"visible, {cache.bytes_per_rank / _MEBIBYTE:.1f} MiB a generator rank",
        "video writer": f"generation waited {summary.writer_blocked_s:.2f} s for it",
        "integrity": summary.integrity,
    }
    if summary.image is not None:
        rows["start frame"] = summary.image
    if summary.recording_failure is not None:
        rows["NOT recorded"] = summary.recording_failure
    if summary.broken_on_purpose is not None:
        rows["broken"] = f"on purpose: {summary.broken_on_purpose}"
    lines = [f"{name:<13} {text}" for name, text in rows.items()]
    lines += [
        f"{'retracted':<13} {retracted_chunks(each)}: {each.reason}" for each in summary.retractions
    ]
    if totals.unverified:
        made = counted(totals.unverified, "chunk")
        lines.append(f"{'unverified':<13} {made}: ranks ended before what they held was verified")
    lines.append(f"{'stage':<13} {'p50 ms':>9} {'p95 ms':>9} {'total s':>9}")
    lines += [
        f"  {stage:<11} {times.p50_ms:>9.2f} {times.p95_ms:>9.2f} {times.total_ms / 1e3:>9.2f}"
        for stage, times in summary.stages.items()
    ]
    lines += [f"{kind.replace('_', ' '):<13} {path}" for kind, path in summary.files.items()]
    return "\n".join(lines)


def _recipe(summary: StreamSummary) -> str:
    is_own = summary.recipe == RECIPE_NAME
    return f"the model's own ({RECIPE_NAME})" if is_own else summary.recipe


def _cache_fill(job: StreamJob, chunks: Sequence[ChunkRecord], spec: KVCacheSpec) -> CacheFill:
    last_epoch = chunks[-1].cache_epoch
    num_in_epoch = sum(chunk.cache_epoch == last_epoch for chunk in chunks)
    end = spec.indices_at(num_in_epoch * job.setup.recipe.frames_per_block)
    return CacheFill(
        kind=str(job.setup.cache),
        visible_frames=end.local_end_index // spec.frame_tokens,
        capacity_frames=spec.capacity_frames,
        bytes_per_rank=spec.num_bytes(job.setup.topology.tp_degree),
    )
