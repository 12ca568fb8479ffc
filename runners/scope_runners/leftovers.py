"""What an earlier stream left at an output is not lost by starting another one there."""

import sys

from scope_contracts.errors import UserInputError
from scope_rt.video.segments import num_held_chunks
from scope_runners import journal
from scope_runners.job import OutputFiles, StreamJob
from scope_runners.journal import Told
from scope_runners.wording import counted


def is_finished(told: Told, files: OutputFiles) -> bool:
    """Whether the video is whole under its own name, though its process may have left more."""
    is_told_in_full = told.begun is None or told.is_published
    return is_told_in_full and files.video.exists() and not num_held_chunks(files.video)


def check_nothing_is_lost(job: StreamJob, *, resumes: bool) -> None:
    """Refuse to replace a stream that can be gone on with, or by `--resume` a finished video.

    Args:
        resumes: whether the stream that is there will be taken up.

    Raises:
        UserInputError: naming what to change, also where `--resume` means another stream.
    """
    files, request, goes_on = job.files, job.request, resumes
    told = journal.read(files.journal)
    num_chunks, is_saved = len(told.entries), files.snapshot.exists()
    chunks = counted(num_chunks, "chunk")
    if is_finished(told, files):
        concludes = goes_on and is_saved and num_chunks >= job.timeline.num_chunks
        if (goes_on or request.resume) and not concludes:
            raise UserInputError(
                f"--resume: {files.video} is finished; choose another --out, or leave --resume out "
                "to make it anew"
            )
    elif num_chunks and not is_saved:
        raise UserInputError(
            f"{files.video} is an unfinished stream of {chunks} without the snapshot "
            f"to go on from; delete {files.journal} to start anew"
        )
    elif num_chunks and not goes_on:
        raise UserInputError(
            f"{files.video} is an unfinished stream of {chunks}; add --resume to go on "
            f"with it, or delete {files.journal} to start anew"
        )
    if goes_on:
        journal.check_same_stream(told, request, files.journal)


def say_how_to_resume(job: StreamJob) -> None:
    """After a stream was ended at once: tell whoever ended it, where there is something to tell."""
    files = job.files
    told = journal.read(files.journal)
    if told.entries and files.snapshot.exists() and not is_finished(told, files):
        print(f"scope-rt: {files.video} is unfinished; add --resume to go on", file=sys.stderr)
