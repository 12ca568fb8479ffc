"""`scope-rt stream` whose ranks break as SCOPE_FAULTS says, without the detectors of SCOPE_DISARM.

`python -m scope_runners.break_it.stream` takes the arguments of `scope-rt stream`.
"""

from collections.abc import Sequence

from scope_runners import stream
from scope_runners.break_it.instruments import instruments_from_environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of `argv` and return the exit code, as `scope_runners.stream.main` does."""
    return stream.main(
        argv,
        instruments_of=instruments_from_environment,
        rank_module="scope_runners.break_it.stream",
    )


if __name__ == "__main__":
    raise SystemExit(main())
