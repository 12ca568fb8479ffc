"""One target under atheris: inputs that reach new code of the contracts become the next seeds.

A process of its own, started by `run`, because libFuzzer never gives control back. It prints the
figures so far as JSON, a line a second; the last line is the final one. Nothing of the contracts
may be imported before atheris instruments them.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

_MAX_INPUT_BYTES = 2**17
_HANG_S = 30
_LIBFUZZER_BYTES = 2**30
"""The corpus it collects lies in this process too; the memory of one input is bounded as ever."""
_REPORT_S = 1.0


def main() -> None:
    """`guided TARGET SEED COUNT SECONDS FOLDER`: until either bound; 0 is no bound."""
    name, seed, count, seconds, folder = sys.argv[1:]
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["scope_contracts"]):
        targets = importlib.import_module("scope_lab.fuzz.targets")
    target = targets.TARGETS[name]
    corpus = Path(folder, f"{name}.corpus")
    corpus.mkdir(parents=True, exist_ok=True)
    for index, data in enumerate(target.seeds):
        (corpus / f"seed{index}").write_bytes(data)
    options = (
        f"-seed={int(seed) + 1}",  # 0 would be a random one
        f"-max_len={_MAX_INPUT_BYTES}",
        f"-timeout={_HANG_S}",
        f"-artifact_prefix={folder}/{name}.",
        "-len_control=0",
    )
    atheris.Setup(
        [sys.argv[0], *options, str(corpus)],
        _runner(name, Path(folder), int(count), float(seconds)),
        custom_mutator=_mutator(target.mutate, atheris),
    )
    atheris.Fuzz()


def _runner(name: str, folder: Path, count: int, seconds: float) -> Callable[[bytes], None]:
    from scope_lab.fuzz.judge import Judge
    from scope_lab.fuzz.targets import TARGETS

    file = folder / f"{name}.input"
    judge = Judge(TARGETS[name], file, most_growth_bytes=_LIBFUZZER_BYTES)
    start_s = told_s = time.monotonic()

    def run(data: bytes) -> None:
        nonlocal told_s
        judge.judge(data)
        now_s = time.monotonic()
        ended = 0 < count <= judge.figures.executions or 0 < seconds <= now_s - start_s
        if ended or now_s - told_s >= _REPORT_S:
            told_s = now_s
            print(judge.figures.to_json(), flush=True)
        if ended:
            judge.close()
            os._exit(0)

    return run


def _mutator(
    mutate: Callable[[bytes, Random], bytes], atheris: Any
) -> Callable[[bytes, int, int], bytes]:
    def change(data: bytes, max_size: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.3:
            plain: bytes = atheris.Mutate(data, max_size)  # another function once fuzzing began
            return plain
        return mutate(data, rng)[:max_size]

    return change


if __name__ == "__main__":
    main()
