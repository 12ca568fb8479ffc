"""Where a stream may write is checked before a chunk is made, and nothing half-made stays there."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_rt.output_file import claim
from scope_rt.video.picture_format import check_recordable
from scope_rt.video.segments import CODEC_OF_SUFFIX
from scope_runners.job import OutputFiles, StreamJob


@contextmanager
def folders_of_outputs(job: StreamJob) -> Iterator[None]:
    """Around a stream: its outputs are checked, folders that lack are made, and said; those of them
    that hold nothing in the end are taken away.

    Raises:
        UserInputError: as `check_outputs`.
    """
    files = job.files
    outputs = (files.video, files.trace, files.record)
    folders = {path.parent for path in outputs if path is not None and not path.parent.exists()}
    made = {each for folder in folders for each in (folder, *folder.parents) if not each.exists()}
    try:
        check_outputs(job)
        for folder in sorted(folders):
            print(f"scope-rt: made the folder {folder}", file=sys.stderr)
        yield
    finally:
        for folder in sorted(made, reverse=True):
            with suppress(OSError):  # it holds what the stream has written
                folder.rmdir()


def check_outputs(job: StreamJob) -> None:
    """Refuse files that the stream could not write; leaves none behind, but their folders.

    Raises:
        UserInputError: a name, folder or picture size cannot be used.
    """
    files, setup = job.files, job.setup
    if files.trace is not None and files.trace.resolve() == files.summary.resolve():
        raise UserInputError(
            f"--trace {files.trace} is where the summary of --out goes; choose another name"
        )
    image = setup.config.sampling.image
    if image is not None:
        _check_is_kept(image, files)
    check_recordable(files.video, width=setup.width, height=setup.height, fps=setup.recipe.fps)
    check_no_shared_names(files)
    claim(files.contact_sheet, suffixes=(".png",)).unlink()
    for path in (files.summary, files.trace):
        if path is not None:
            claim(path, suffixes=(".json",)).unlink()
    if job.request.record is not None:
        claim(job.request.record, suffixes=(".scope",)).unlink()


def _check_is_kept(image: Path, files: OutputFiles) -> None:
    """Raises UserInputError where a file of the stream would replace the picture it begins with."""
    outputs = (files.contact_sheet, files.summary, files.trace, files.video)
    if any(path is not None and path.resolve() == image.resolve() for path in outputs):
        raise UserInputError(
            f"image {image} is where a file beside --out {files.video} goes; choose another --out"
        )


def check_no_shared_names(files: OutputFiles) -> None:
    """Refuse to replace the summary and contact sheet of `a.mp4` by those of `a.webm`.

    Raises:
        UserInputError: naming the other video.
    """
    ours = (files.contact_sheet, files.summary)
    for suffix in CODEC_OF_SUFFIX:
        other = OutputFiles(files.video.with_suffix(suffix), None)
        if suffix == files.video.suffix.lower() or not other.is_there:
            continue
        if other.is_under_way or any(path.exists() for path in ours):
            raise UserInputError(
                f"output {files.video}: {other.video} has its summary and contact sheet at "
                f"{files.summary.name} and {files.contact_sheet.name} too; choose another name"
            )
