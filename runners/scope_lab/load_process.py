"""One rank of `bench_load`: says when it is ready, loads when it is told to, and says what it took.

`python -m scope_lab.load_process FOLDER TP DTYPE RANK`
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from scope_rt.collectives import SoloCollectives
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.fingerprint import Fingerprint
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.models.shards import shard_of
from scope_rt.models.weight_files import WeightFiles


class Place(SoloCollectives):
    """A place in a group in which nothing is summed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def status_bytes(key: str) -> int:
    """An entry of this process's `/proc` status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def bytes_read() -> int:
    """By all of this process's reads so far, from whatever they came."""
    return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])


def main(folder: Path, tp: int, dtype: torch.dtype, rank: int) -> None:
    torch.set_num_threads(1)
    config, place = CausalWanConfig.from_folder(folder), Place(rank, tp)
    pts = [*folder.glob("*.pt")]
    files = WeightFiles.of_state_dict(pts, "generator") if pts else WeightFiles.open(folder)
    small, cpu = ModelFolder.open(EMBEDDED), torch.device("cpu")
    Fingerprint(small.transformer(SoloCollectives(), dtype=dtype, device=cpu))  # imports count not
    folder_of = replace(small, path=folder, config=config, weights=files, lora=None)
    print("ready", flush=True)
    sys.stdin.readline()
    start_s = time.perf_counter()
    slice_bytes = sum(
        tensor.read(shard_of(name, place, head_dim=config.attention_head_dim)).nbytes
        for name, tensor in files.tensors.items()
    )
    read_s = time.perf_counter() - start_s
    before, read_before, start_s = status_bytes("VmRSS"), bytes_read(), time.perf_counter()
    model = folder_of.transformer(place, dtype=dtype, device=cpu)
    held = Fingerprint(model, place).checksums
    load_s = time.perf_counter() - start_s
    said = {
        "load": {
            "rank": rank,
            "load_s": load_s,
            "read_s": read_s,
            "slice_bytes": slice_bytes,
            "kept_bytes": sum(weight.nbytes for weight in model.parameters()),
            "read_bytes": bytes_read() - read_before,
            "peak_bytes": status_bytes("VmHWM") - before,
        },
        "stored": model.as_read.stored,
        "used": model.as_read.used,
        "held": held,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3]), int(sys.argv[4]))
