"""`scripts/lab NAME`: one table of everything that measures, trains or proves."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from scope_contracts.errors import UserInputError
from scope_runners.guarded import guarded


@dataclass(frozen=True, slots=True)
class Experiment:
    """A module with `main(argv)`, which may raise what `guarded` says, and what it shows."""

    module: str
    help: str


EXPERIMENTS: Mapping[str, Experiment] = {
    "bench-gpu": Experiment("scope_lab.gpu_bench.run", "all of one GPU, in under ten minutes"),
    "bench-serve": Experiment(
        "scope_lab.serve_bench.run", "what viewers and recordings cost a served stream"
    ),
    "bench_contract": Experiment("scope_lab.bench_contract", "what the contract costs a chunk"),
    "bench_integrity": Experiment(
        "scope_lab.bench_integrity", "what verifying numbers and state costs a chunk"
    ),
    "bench_load": Experiment("scope_lab.bench_load", "ranks load a checkpoint by slice"),
    "bench_snapshot": Experiment("scope_lab.bench_snapshot", "what it costs to be able to resume"),
    "bench_stream": Experiment("scope_lab.bench_stream", "frames/s of every part of a stream"),
    "eval_tiny": Experiment("scope_lab.tiny.evaluate", "the embedded model as a viewer sees it"),
    "false_alarms": Experiment(
        "scope_lab.false_alarms", "clean streams by the thousand: none may be refused"
    ),
    "fuzz": Experiment("scope_lab.fuzz.run", "hostile bytes for every decoder"),
    "kill_stream": Experiment(
        "scope_lab.kill_stream", "a stream killed at every change of its disk, and resumed"
    ),
    "kv_bench": Experiment("scope_lab.kv_bench.run", "bytes, speed and quality of every KV cache"),
    "kv_cache_proof": Experiment("scope_lab.kv_proof", "why a cache changes nothing, in numbers"),
    "parity": Experiment("scope_lab.parity", "a recorded rollout of a public model's own code"),
    "precision": Experiment("scope_lab.precision", "bfloat16 beside float32: errors of each part"),
    "recompute_experiment": Experiment(
        "scope_lab.recompute_experiment", "recompute less often: quality and speed"
    ),
    "soak": Experiment("scope_lab.soak.run", "a stream under random faults, for hours"),
    "tests": Experiment("scope_lab.long_tests", "the tests that take too long for the suite"),
    "train_recall": Experiment("scope_lab.recall.train", "train the recall model"),
    "train_tiny": Experiment("scope_lab.tiny.train", "train the embedded model"),
    "two_hosts": Experiment("scope_lab.two_hosts", "two hosts: cable cut, leader and host killed"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the experiment that `argv` names and return its exit code."""
    name, *arguments = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("-h", "--help"):
        print("scripts/lab NAME [ARGUMENT ...]\n")
        for known, experiment in EXPERIMENTS.items():
            print(f"  {known:<21} {experiment.help}")
        return 0
    return guarded(lambda: _run(name, arguments), speaker=name)


def _run(name: str, arguments: Sequence[str]) -> int:
    if name not in EXPERIMENTS:
        raise UserInputError(f"no experiment is called {name!r}; scripts/lab lists all")
    code: int = import_module(EXPERIMENTS[name].module).main(arguments)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
