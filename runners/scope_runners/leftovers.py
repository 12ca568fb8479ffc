"""What an earlier stream left at an output is not lost by starting another one there."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_contracts.log_records import Scheduled
from scope_rt.control.scheduled_event import scheduled_record
from scope_rt.record.progress import StreamProgress
from scope_rt.record.reader import read_progress
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.record.snapshot_header import SnapshotHeader, check_identity
from scope_rt.stream_identity import check_same_picture, identity
from scope_runners.job import OutputFiles, StreamJob
from scope_runners.wording import counted


def check_nothing_is_lost(
    job: StreamJob, *, resumes: bool, progress: StreamProgress | None = None
) -> None:
    """Refuse to replace a stream that can be resumed, or by `--resume` a finished video.

    Args:
        resumes: whether the stream that is there will be resumed.
        progress: how far it is by its log, for who has read that already.

    Raises:
        UserInputError: naming what to change, also where `--resume` means another stream.
    """
    files, header = job.files, SnapshotStore(job.files.snapshot).header()
    _check_no_earlier_version(files)
    log = _log_of(files, header)
    if progress is None:
        progress = read_progress(log)
    num_chunks = len(progress.encoded if header is None else progress.shown)
    chunks = counted(num_chunks, "chunk")
    if is_finished(progress, header, files):
        concludes = resumes and header is not None and num_chunks >= job.timeline.num_chunks
        if (resumes or job.request.resume) and not concludes:
            raise UserInputError(
                f"--resume: {files.video} is finished, as after one Ctrl-C too; choose another "
                "--out, or leave --resume out to make it anew"
            )
    elif num_chunks and header is None:
        raise UserInputError(
            f"{files.video} is an unfinished stream of {chunks} without the snapshot to resume it "
            f"from; to start anew, delete {log}"
        )
    elif num_chunks and not resumes:
        raise UserInputError(
            f"{files.video} is an unfinished stream of {chunks}; add --resume to resume it, or to "
            f"start anew, delete {files.snapshot} and {log}"
        )
    if resumes and header is not None:
        check_identity(header, identity(job.setup), folder=files.snapshot)
        check_same_picture(job.setup, progress.start_frame, folder=files.snapshot)
        check_same_stream(progress, job, log)
        _check_same_record(files, log)
    else:
        check_record_is_new(job)


def check_record_is_new(job: StreamJob) -> None:
    """Refuse to replace a recording, but for what a lost start of this run left.

    That has logged no chunk: a first resume point is saved before any. With one, or at the first
    start, it is another stream's.

    Raises:
        UserInputError: naming the file.
    """
    record, is_restart = job.files.record, job.setup.environment.attempt > 0
    if record is None or not record.exists() or not record.stat().st_size:
        return
    if not is_restart or read_progress(record).shown:
        raise UserInputError(
            f"--record {record} is there already; choose another file, or delete it"
        )


def _check_no_earlier_version(files: OutputFiles) -> None:
    """Refuse where an earlier version left an unfinished stream, whose chunks would be lost."""
    for kind in ("journal", "checkpoint"):
        path = files.video.with_name(f".{files.video.name}.{kind}")
        if path.exists():
            raise UserInputError(
                f"{files.video} is an unfinished stream of an earlier version, which this one "
                f"cannot resume; resume it with that version, or to start anew, delete {path}"
            )


def is_finished(
    progress: StreamProgress, header: SnapshotHeader | None, files: OutputFiles
) -> bool:
    """Whether the video is whole under its own name, though its process may have left more."""
    is_all_there_is = progress.begun is None and header is None
    return files.video.exists() and (is_all_there_is or progress.is_published)


def check_same_stream(progress: StreamProgress, job: StreamJob, log: Path) -> None:
    """Refuse to resume a stream that another request began; `--seconds` may change.

    Raises:
        UserInputError: naming the flag that differs.
    """
    if progress.begun is None:
        return
    theirs = _asked_for(progress.begun.prompt, progress.scheduled)
    timeline = job.timeline
    events = [scheduled_record(event) for event in (*timeline.events, *timeline.later)]
    ours = _asked_for(job.request.prompt, events)
    for (flag, mine), (_, other) in zip(ours, theirs, strict=True):
        if mine != other:
            raise UserInputError(
                f"{flag} is {mine}, and the stream to resume was begun with {other}; use that "
                f"again, or to start anew, delete {job.files.snapshot} and {log}"
            )


def _check_same_record(files: OutputFiles, log: Path) -> None:
    """Refuse a recording that would never be written: a stream keeps the log it began."""
    if files.record is not None and files.record.resolve() != log.resolve():
        raise UserInputError(
            f"--record is {files.record}, and the stream to resume keeps its log in {log}; leave "
            "--record out, or give that file if --record began it"
        )


def say_how_to_resume(job: StreamJob) -> None:
    """After a stream was ended at once: tell whoever ended it, where there is something to tell."""
    files, header = job.files, SnapshotStore(job.files.snapshot).header()
    if header is None:
        return
    progress = read_progress(_log_of(files, header))
    if progress.shown and not is_finished(progress, header, files):
        print(f"scope-rt: {files.video} is unfinished; add --resume to resume it", file=sys.stderr)


def _log_of(files: OutputFiles, header: SnapshotHeader | None) -> Path:
    """The log of the stream that is there, of which only its snapshot may know the name."""
    if header is None:
        return files.hidden_log
    saved = Path(header.log)
    if not saved.exists():
        return files.log
    as_asked = (files.log, files.hidden_log)
    return next((path for path in as_asked if path.absolute() == saved), saved)


def _asked_for(prompt: str, events: Sequence[Scheduled]) -> Iterator[tuple[str, object]]:
    """What makes a stream, by the flag that asks for it."""
    soft = [event for event in events if event.transition_num_chunks]
    yield "--prompt", repr(prompt)
    prompts = [f"{e.prompt!r} at chunk {e.chunk_index}" for e in events if e.prompt is not None]
    yield "--prompt-at", ", ".join(prompts) or "none"
    cuts = [f"at chunk {event.chunk_index}" for event in events if event.hard_cut]
    yield "--hard-cut-at", ", ".join(cuts) or "none"
    yield "--transition", max((event.transition_num_chunks for event in soft), default=0)
    yield "--transition-method", max((event.transition_method for event in soft), default="none")
    yield "--transition-bias", min((event.transition_bias_floor for event in soft), default=1.0)
