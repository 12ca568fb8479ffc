"""What a run leaves lies in a folder of its own."""

from pathlib import Path

from scope_contracts.errors import UserInputError


def fresh_folder(path: Path, *, otherwise: str = "") -> Path:
    """Make `path`, or take it where it is an empty folder.

    Raises:
        UserInputError: it holds something, is a file or cannot be made; `otherwise` says what else
            than another --out would help.
    """
    try:
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise UserInputError(f"{path} is not an empty folder; choose another --out{otherwise}")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserInputError(
            f"cannot make the folder {path} ({error.strerror}); choose another --out"
        ) from error
    return path
