"""A recording that a person named: read, or refused in one sentence with its path and the fix."""

from dataclasses import dataclass
from pathlib import Path

from scope_contracts.errors import ContractError, UserInputError, VersionError
from scope_contracts.log_file import Entry, LogReader
from scope_rt.record.reader import StreamHistory, open_log, read_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a recording tells, and where the latents of its finished chunks lie."""

    path: Path
    stream: StreamHistory
    places: dict[int, Entry]
    """By chunk: whoever wants latents need not read the file again to find them."""

    @property
    def damage(self) -> ContractError | None:
        """What is wrong after the last record that could be read, with the path; None where
        nothing."""
        damage = self.stream.damage
        if damage is None:
            return None
        fix = "copy the file again from where it was written"
        return type(damage)(f"the recording {self.path}: {damage}; {fix}")


def read_recording(path: Path, *, check_blobs: bool = True) -> Recording:
    """The recording at `path`; damage after its first record is in `damage`.

    Without `check_blobs` latents are stepped over, and damage in them is not found.

    Raises:
        UserInputError: there is no such file, it is no recording, it is of another version, or it
            has no whole record.
    """
    with open_log(path) as file:
        try:
            stream, places = read_stream(LogReader(file, thorough=check_blobs))
        except VersionError as error:
            raise UserInputError(f"the recording {path}: {error}") from error
        except ContractError as error:
            raise UserInputError(f"the recording {path}: {error}; record a stream again") from error
    return Recording(path=path, stream=stream, places=places)
