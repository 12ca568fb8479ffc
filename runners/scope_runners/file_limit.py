"""Too few open files are noticed before a rank starts: in the middle, any line may meet them."""

import resource

from scope_contracts.errors import UserInputError

_FILES, _FILES_A_RANK = 32, 8
"""What a stream and every rank of it open at most, with room to spare."""


def check_file_limit(num_ranks: int) -> None:
    """Let this process open as many files as `num_ranks` need, or refuse.

    Raises:
        UserInputError: naming the limit and how to raise it.
    """
    need = _FILES + _FILES_A_RANK * num_ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise UserInputError(
            f"a process here may open {hard} files, and {num_ranks} ranks need {need}; raise the "
            "limit (ulimit -n 1024)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
