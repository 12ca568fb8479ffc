"""What a numeric test claims holds with the kernels of older processors too.

Modules marked `numeric` run again in a process of their own for every set of kernels that this
processor can run besides its best one, with which the rest of the suite runs. In the suite these
are the oldest ones and the modules of streams, and of each test's cases every twelfth and the last,
but for three tests that import for seconds; in the laboratory all kernels, all cases, and the
modules of language models.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
NOT_HERE = 77
"""Exit code where the processor lacks the kernels: torch takes others and says nothing."""
CHILD = f"""
import sys, pytest, torch
from tests.test_cpu_kernels import Sample
want, step, *arguments = sys.argv[1:]
got = torch.backends.cpu.get_cpu_capability()
if got != want:
    print(got)
    sys.exit({NOT_HERE})
sys.exit(pytest.main(arguments, plugins=[Sample(int(step))]))
"""
OPTIONS = ["-q", "-x", "-m", "numeric", "-p", "no:cacheprovider", "-p", "no:xdist"]
# flex compiles for seconds, and then calls the kernels that the other backends call too.
ALL = ["-k", "not flex"]
# What each imports, diffusers and the profiler, costs more than a fifth of all the others.
SAMPLE = ["-k", "not flex and not equals_diffusers and not kernel_family and not cuda_kernel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Of torch itself, and of the two libraries that multiply its matrices."""

    aten: str
    mkl: str
    onednn: str

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name[:6] != "PYTEST"}
        return kept | {
            "ATEN_CPU_CAPABILITY": self.aten.lower(),
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "OMP_NUM_THREADS": "1",
        }


class Sample:
    """Of each test's cases every so many, from the first on, and the last."""

    def __init__(self, step: int) -> None:
        self._step = step

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        items[:] = [
            case
            for cases in tests.values()
            for number, case in enumerate(cases)
            if number % self._step == 0 or case is cases[-1]
        ]


OLDER = [
    Kernels(aten="DEFAULT", mkl="SSE4_2", onednn="SSE41"),
    Kernels(aten="AVX2", mkl="AVX2", onednn="AVX2"),
]


def numeric_modules(*, of_streams: bool) -> list[str]:
    """Found by their mark: collecting the whole suite would import all of it."""
    here = ROOT / "tests"
    return [
        str(path)
        for path in sorted(here.rglob("test_*.py"))
        if "pytest.mark.numeric" in path.read_text()
        and path != Path(__file__)
        and of_streams != path.is_relative_to(here / "lm")
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("of_streams", "step"),
    [
        pytest.param(True, 12, id="sample"),
        pytest.param(True, 1, id="streams", marks=pytest.mark.lab),
        pytest.param(False, 1, id="lm", marks=pytest.mark.lab),
    ],
)
@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(kernels, id=kernels.aten, marks=[] if kernels is OLDER[0] else pytest.mark.lab)
        for kernels in OLDER
    ],
)
def test_numeric_tests_hold_with_the_kernels_of_older_processors(
    kernels: Kernels, of_streams: bool, step: int
) -> None:
    if torch.backends.cpu.get_cpu_capability() == kernels.aten:
        pytest.skip(f"the suite itself runs with {kernels.aten} kernels here")
    modules = numeric_modules(of_streams=of_streams)
    chosen = ALL if step == 1 else SAMPLE
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, kernels.aten, str(step), *OPTIONS, *chosen, *modules],
        cwd=ROOT,
        env=kernels.environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if ran.returncode == NOT_HERE:
        got = ran.stdout.strip()
        pytest.skip(f"this processor has no {kernels.aten} kernels; torch took {got} ones")
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
