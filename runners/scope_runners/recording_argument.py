"""A recording that a person named: read, or refused in one sentence with its path and the fix."""

from pathlib import Path

from scope_contracts.errors import ContractError, UserInputError, VersionError
from scope_contracts.log_file import LogReader
from scope_rt.record.reader import StreamHistory, open_log, read_stream


def read_recording(path: Path) -> StreamHistory:
    """The stream of the recording at `path`; damage after its first record is in `damage`.

    Raises:
        UserInputError: there is no such file, it is no recording, it is of another version, or it
            has no whole record.
    """
    with open_log(path) as file:
        try:
            stream, _ = read_stream(LogReader(file))
        except VersionError as error:
            raise UserInputError(f"the recording {path}: {error}") from error
        except ContractError as error:
            raise UserInputError(f"the recording {path}: {error}; record a stream again") from error
    return stream


def damage_of(path: Path, stream: StreamHistory) -> ContractError | None:
    """What is wrong after the last record that could be read, with the path; None where nothing."""
    if stream.damage is None:
        return None
    fix = "copy the file again from where it was written"
    return type(stream.damage)(f"the recording {path}: {stream.damage}; {fix}")
