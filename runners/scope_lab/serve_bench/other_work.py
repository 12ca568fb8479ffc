"""Work that has nothing to do with a stream, as much of each core as is asked for, until standard
input ends. `python -m scope_lab.serve_bench.other_work CORE:PART ...`.

It compresses pictures: what encoders do to caches and clock rates of a machine, this does too.
"""

import os
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from multiprocessing import Process

import numpy as np

_PERIOD_S = 0.02


def main(parts: Sequence[str]) -> None:
    """Keep each core busy for its part of the time."""
    workers = [Process(target=_work, args=_parsed(part), daemon=True) for part in parts]
    for worker in workers:
        worker.start()
    print("working", flush=True)
    sys.stdin.read()
    for worker in workers:
        worker.terminate()
        worker.join()


def _parsed(part: str) -> tuple[int, float]:
    core, _, share = part.partition(":")
    return int(core), float(share)


def _work(core: int, part: float) -> None:
    os.sched_setaffinity(0, {core})
    picture = np.random.default_rng(0).integers(0, 64, 64 * 1024, dtype=np.uint8).tobytes()
    paused, began_s, worked_s = threading.Event(), time.monotonic(), 0.0
    while True:
        while worked_s < part * (time.monotonic() - began_s):
            zlib.compress(picture, 1)
            worked_s = time.process_time()
        paused.wait(_PERIOD_S)


if __name__ == "__main__":
    main(sys.argv[1:])
