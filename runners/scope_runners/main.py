"""`scope-rt COMMAND`: one table of what a user runs."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scope_runners.command_parser import CommandParser
from scope_runners.guarded import guarded
from scope_runners.request import add_stream_arguments, request_of
from scope_runners.stop_request import leave_at_once, taking_stop_signals
from scope_runners.version import PrintVersions


def main(argv: Sequence[str] | None = None) -> int:
    """Run `argv` (the process's own by default) and return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return guarded(lambda: _dispatch(arguments))


@dataclass(frozen=True, slots=True)
class Command:
    """One word after `scope-rt`. `open` imports what it needs, declares its arguments and returns
    what runs it: PyTorch takes seconds to load, which --help and a mistyped word need not cost.
    """

    help: str
    open: Callable[[argparse.ArgumentParser], Callable[[argparse.Namespace, Sequence[str]], int]]


def _dispatch(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="scope-rt", description="Streaming video diffusion transformers.")
    parser.add_argument("--version", action=PrintVersions, help="print the versions and leave")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((word for word in argv if word in COMMANDS), None)
    run: Callable[[argparse.Namespace, Sequence[str]], int] | None = None
    reader: argparse.ArgumentParser = parser
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help)
        if name == asked:
            run = command.open(own)
            reader = own
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        reader.error(f"unrecognized arguments: {' '.join(unknown)}")
    assert run is not None, "the parser refuses a command that is none of ours"
    return run(parsed, argv[1:])


def _open_stream(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    add_stream_arguments(parser)

    def run(parsed: argparse.Namespace, argv: Sequence[str]) -> int:
        with taking_stop_signals(leave_at_once):
            from scope_runners.stream import run_here_or_launch

        return run_here_or_launch(request_of(parsed), argv)

    return run


def _open_serve(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    from scope_runners.serve.command import add_serve_arguments, run_serve

    add_serve_arguments(parser)
    return lambda parsed, argv: run_serve(parsed)


def _open_inspect(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    from scope_runners.inspect_recording import add_inspect_arguments, run_inspect

    add_inspect_arguments(parser)
    return lambda parsed, argv: run_inspect(parsed)


def _open_replay(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    from scope_runners.replay import add_replay_arguments, run_replay

    add_replay_arguments(parser)
    return run_replay


def _open_verify(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    from scope_runners.verify import add_verify_arguments, run_verify

    add_verify_arguments(parser)
    return lambda parsed, argv: run_verify(parsed)


def _open_model(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    from scope_runners.model_command import add_model_arguments, run_model

    add_model_arguments(parser)
    return lambda parsed, argv: run_model(parsed)


def _open_break_it(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    from scope_runners.break_it.command import add_break_it_arguments, run_break_it

    add_break_it_arguments(parser)
    return lambda parsed, argv: run_break_it(parsed)


def _open_plan_memory(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    from scope_runners.plan_memory.arguments import add_plan_memory_arguments
    from scope_runners.plan_memory.command import run_plan_memory

    add_plan_memory_arguments(parser)
    return lambda parsed, argv: run_plan_memory(parsed)


def _open_runbook(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    from scope_runners.runbook import add_runbook_arguments, run_runbook

    add_runbook_arguments(parser)
    return lambda parsed, argv: run_runbook(parsed)


def _open_top(
    parser: argparse.ArgumentParser,
) -> Callable[[argparse.Namespace, Sequence[str]], int]:
    from scope_runners.top import add_top_arguments, run_top

    add_top_arguments(parser)
    return lambda parsed, argv: run_top(parsed)


COMMANDS = {
    "stream": Command("make a video from a prompt", _open_stream),
    "serve": Command("show a live stream in the browser, and steer it", _open_serve),
    "inspect": Command("look into a flight recording", _open_inspect),
    "replay": Command("run a recorded stream again and compare", _open_replay),
    "verify": Command("say whether a stream's files are as they were written", _open_verify),
    "model": Command("say what a model folder is, and whether it holds what it did", _open_model),
    "plan-memory": Command("say what a rank needs, and what to change", _open_plan_memory),
    "break-it": Command("inject faults into real ranks and see them caught", _open_break_it),
    "top": Command("show the sessions of a server in this terminal", _open_top),
    "runbook": Command("show what an error's `see runbooks/...` points to", _open_runbook),
}


if __name__ == "__main__":
    raise SystemExit(main())
