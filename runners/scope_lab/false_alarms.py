"""Clean streams raise no error: dtypes, levels, caches, steered at random, on each kind of CPU.

Each CPU capability has a process of its own, told by ATEN_CPU_CAPABILITY to use nothing better,
and streams until it has its chunks. A line of the progress file is one stream that ended; a run
that was stopped continues there, and one that is complete is reported again.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from scope_contracts.errors import UserInputError
from scope_lab.clean_streams import CHUNKS, StreamResult, run_stream
from scope_runners.arguments import positive
from scope_runners.command_parser import CommandParser
from scope_runners.exit_codes import FAILED

CAPABILITIES = ("default", "avx2", "avx512")
"""From the least on, as ATEN_CPU_CAPABILITY names them."""
_VARIABLE = "ATEN_CPU_CAPABILITY"


def main(argv: Sequence[str]) -> int:
    """Stream and report; 1 where a clean stream was refused or a process did not finish."""
    parser = CommandParser(prog="scripts/lab false_alarms", description=__doc__)
    parser.add_argument(
        "--chunks", type=positive, default=20_000, help="of each capability (default 20000)"
    )
    parser.add_argument(
        "--progress",
        type=Path,
        default=Path("out/false_alarms.jsonl"),
        help="where progress is kept (default out/false_alarms.jsonl)",
    )
    parser.add_argument("--capability", choices=CAPABILITIES, help="stream here, on this one only")
    arguments = parser.parse_args(argv)
    arguments.progress.parent.mkdir(parents=True, exist_ok=True)
    if arguments.capability is not None:
        stream_all(arguments.capability, arguments.chunks, arguments.progress)
        return 0
    command = [sys.executable, "-m", "scope_lab.main", "false_alarms"]
    command += ["--chunks", str(arguments.chunks), "--progress", str(arguments.progress)]
    processes = [
        subprocess.Popen(
            [*command, "--capability", capability],
            env=os.environ | {"OMP_NUM_THREADS": "1", _VARIABLE: capability},
        )
        for capability in capabilities_here()
    ]
    codes = [process.wait() for process in processes]
    results = read(arguments.progress)
    print(table(results))
    return FAILED if any(codes) or any(result.error for result in results) else 0


def capabilities_here() -> list[str]:
    """What this CPU can do."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    return list(CAPABILITIES[: CAPABILITIES.index(best) + 1])


def stream_all(capability: str, num_chunks: int, progress: Path) -> None:
    """Stream what is missing of `num_chunks` on `capability`, and keep each result in `progress`.

    Raises:
        UserInputError: this process was started with another capability.
    """
    if torch.backends.cpu.get_cpu_capability().lower() != capability:
        raise UserInputError(f"start this with {_VARIABLE}={capability}; it has another one")
    torch.set_num_threads(1)
    done = {result.number for result in read(progress) if result.capability == capability}
    num_streams = -(-num_chunks // CHUNKS)
    for number in sorted(set(range(num_streams)) - done):
        result = run_stream(capability, number)
        with open(progress, "a") as file:
            file.write(f"\n{json.dumps(result.as_dict())}\n")  # ends a line that was torn
        outcome = result.error or f"off by {result.closest:.3f} of a bound at most"
        print(
            f"{capability}, stream {number + 1} of {num_streams}, {result.combination}: "
            f"{result.chunks} chunks, {outcome}",
            flush=True,
        )


def read(progress: Path) -> list[StreamResult]:
    """All streams that ended; lines that were torn are left out."""
    results: list[StreamResult] = []
    lines = progress.read_text().splitlines() if progress.exists() else []
    for line in filter(None, lines):
        with suppress(json.JSONDecodeError):
            results.append(StreamResult(**json.loads(line)))
    return results


def table(results: Iterable[StreamResult]) -> str:
    """A line for each capability and combination."""
    of_kind: dict[tuple[str, str], list[StreamResult]] = defaultdict(list)
    for result in results:
        of_kind[result.capability, result.combination].append(result)
    row = "| {:<8} | {:<33} | {:>7} | {:>6} | {:>7} | {:<24} |".format
    lines = [
        row("CPU", "combination", "chunks", "errors", "closest", "where"),
        f"|{'-' * 10}|{'-' * 35}|{'-' * 8}:|{'-' * 7}:|{'-' * 8}:|{'-' * 26}|",
    ]
    for (capability, combination), each in sorted(of_kind.items()):
        closest = max(each, key=lambda result: result.closest)
        errors = [result.error for result in each if result.error]
        chunks = sum(result.chunks for result in each)
        nearest = f"{closest.closest:.3f}"
        lines.append(row(capability, combination, chunks, len(errors), nearest, closest.stage))
        lines += [f"  {error}" for error in errors]
    return "\n".join(lines)
