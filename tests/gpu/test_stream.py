"""A whole stream on a GPU is that of the CPU but for rounding; on two, NCCL adds up its parts."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import warm_python
from tests.gpu.conftest import NEEDS_GPU

STREAM = """
import sys, torch
from scope_rt.config import StreamConfig
from scope_rt.session import StreamSession
plan, tp, out = sys.argv[1:]
config = StreamConfig.load(plan=plan, tp=int(tp), seed=7, integrity="strict", dtype="float32")
with StreamSession(config) as session:
    chunks = list(session.stream("a red circle", num_chunks=2))
    if session.is_control_rank:
        torch.save([chunk.latents.float() for chunk in chunks], out)
"""
LARGEST_DIFFERENCE = 1e-2
"""Of latents of size 1. No GPU has run this: to be tightened by what the first one shows."""


def latents(
    folder: Path, *, visible: str | None, plan: str = "single", tp: int = 1
) -> list[Tensor]:
    """Of two chunks, on the GPUs that are `visible`; None is all there are."""
    out, script = folder / "latents.pt", folder / "stream.py"
    script.write_text(STREAM)
    env = dict(os.environ) | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp}"]
    launch = [] if plan == "single" else run
    started = [*launch, str(script)] if launch else ["-c", STREAM]
    command = [sys.executable, *started, plan, str(tp), str(out)]
    done = warm_python.run(command, env=env, timeout=110)
    assert done.returncode == 0, done.stderr
    found: list[Tensor] = torch.load(out)
    return found


def difference(mine: list[Tensor], others: list[Tensor]) -> float:
    pairs = zip(mine, others, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("visible", ["", pytest.param(None, marks=NEEDS_GPU)], ids=["cpu", "gpu"])
def test_a_stream_on_a_gpu_is_that_of_the_cpu(tmp_path: Path, visible: str | None) -> None:
    mine, others = latents(tmp_path, visible=visible), latents(tmp_path, visible="")
    assert difference(mine, others) <= LARGEST_DIFFERENCE


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("visible", ["", pytest.param(None, marks=TWO_GPUS)], ids=["cpu", "gpus"])
def test_two_gpus_generate_what_one_process_does(tmp_path: Path, visible: str | None) -> None:
    mine = latents(tmp_path, visible=visible, plan="tp_v1_1", tp=2)
    assert difference(mine, latents(tmp_path, visible="")) <= LARGEST_DIFFERENCE
