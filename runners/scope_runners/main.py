"""`scope-rt COMMAND`: every failure we foresee ends as one sentence and an exit code, no traceback.

Exit codes: 0 done; 1 the stream failed; 2 the command cannot be used as typed; 128 + n signal n.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence

from scope_contracts.errors import ScopeError, UserInputError
from scope_runners.request import CommandParser, StreamRequest, add_stream_arguments

FAILED, BAD_INPUT = 1, 2
INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run `argv` (the process's own by default) and return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return guarded(lambda: _dispatch(arguments))


def guarded(command: Callable[[], int], *, speaker: str = "scope-rt") -> int:
    """Run `command`; what it raises becomes one sentence of `speaker` and the exit code for it."""
    try:
        return command()
    except ScopeError as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, UserInputError) else FAILED
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"{speaker}: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED


def _dispatch(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="scope-rt", description="Streaming video diffusion transformers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_stream_arguments(commands.add_parser("stream", help="make a video from a prompt"))
    parsed = vars(parser.parse_args(argv))
    del parsed["command"]
    # Loading PyTorch takes seconds, which --help and a mistyped flag need not cost.
    from scope_runners.stream import run_here_or_launch

    return run_here_or_launch(StreamRequest(**parsed), argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
