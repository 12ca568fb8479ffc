"""Prints what a rank of four holds at most while it loads a large transformer; not a test itself.

`python -m tests.models.peak_of_loading FOLDER DTYPE ...`, FOLDER with `model/` and `model/big/`: a
line for each DTYPE, which has a process of its own.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from scope_lab.load_process import Place, status_bytes
from scope_rt.models.fingerprint import Fingerprint
from scope_rt.models.loading import ModelFolder
from scope_rt.models.weight_files import WeightFiles
from tests.sparse_checkpoint import CONFIG

SECOND_OF_FOUR = Place(1, 4)


def main(folder: Path, dtype: torch.dtype) -> None:
    small, cpu = ModelFolder.open(folder / "model"), torch.device("cpu")
    Fingerprint(small.transformer(SECOND_OF_FOUR, dtype=dtype, device=cpu))  # imports are no shard
    weights = WeightFiles.open(folder / "model" / "big")
    large = replace(small, config=CONFIG, weights=weights)
    before = status_bytes("VmRSS")
    model = large.transformer(SECOND_OF_FOUR, dtype=dtype, device=cpu)
    Fingerprint(model)
    shard_bytes = sum(weight.nbytes for weight in model.parameters())
    peak_bytes = status_bytes("VmHWM") - before
    print(json.dumps({"shard_bytes": shard_bytes, "peak_bytes": peak_bytes}), flush=True)  # noqa: T201


if __name__ == "__main__":
    for name in sys.argv[2:]:
        pid = os.fork()
        if pid == 0:
            main(Path(sys.argv[1]), getattr(torch, name))
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)
