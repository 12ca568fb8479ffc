"""What a machine lacks, memory, files or a disk, is said with what to change, not as a traceback.

Any line may run into it, so it is told apart where a command ends and not where it began.
"""

import errno
from collections.abc import Iterator

from scope_runners.exit_codes import BAD_INPUT, DISK_FULL, FAILED

_NO_FILES = (errno.EMFILE, errno.ENFILE)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "out of memory", "bad_alloc")
"""How PyTorch says it, in a `RuntimeError`."""


def shortage_of(error: BaseException) -> tuple[str, int] | None:
    """A sentence and an exit code, where `error` or what it came from is a shortage."""
    for cause in _chain(error):
        match cause:
            case OSError(errno=errno.ENAMETOOLONG):
                return f"{cause.filename}: the path is too long; choose a shorter one", BAD_INPUT
            case OSError(errno=number) if number in _NO_FILES:
                return _FILES, FAILED
            case OSError(errno=number) if number in (*_FULL, errno.EIO):
                where = f"{cause.filename}: " if cause.filename else "output: "
                code = DISK_FULL if is_full_disk(cause) else FAILED
                return f"{where}{cause.strerror}; free disk space or choose another one", code
            case MemoryError() | OSError(errno=errno.ENOMEM):
                return _MEMORY, FAILED
            case RuntimeError() if any(words in str(cause) for words in _NO_MEMORY):
                return _MEMORY, FAILED
            case RuntimeError() | ImportError() if "Too many open files" in str(cause):
                return _FILES, FAILED
    return None


def is_full_disk(error: BaseException) -> bool:
    """Whether `error`, or what it came from, is that a disk takes no more."""
    return any(isinstance(each, OSError) and each.errno in _FULL for each in _chain(error))


_FILES = "too many files are open for this process; raise its limit (ulimit -n 1024), try again"
_MEMORY = (
    "there is not enough memory; lower --height and --width, or choose another --kv-cache "
    "(scope-rt runbook cache-memory)"
)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
