"""How ranks load a checkpoint by slice: bytes read, peak memory, and how fast, beside a plain copy.

Writes a transformer of the 14B's widths (of fewer layers) with random weights, in shards with an
index or as one `.pt`, and loads it on `--tp` ranks at once, each a process of its own. The first
load may come from the disk; those after it come from the page cache.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from scope_contracts.errors import ScopeError
from scope_contracts.weights import added_up, check_loaded
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.original_names import diffusers_name
from scope_rt.models.shards import is_sharded
from scope_runners.arguments import dtype
from scope_runners.command_parser import CommandParser

RANK_MODULE = "scope_lab.load_process"
LARGE, SMALL = (40, 128, 13_824), (8, 64, 2048)
"""Heads, their channels and those of the feed-forward: the 14B's, and those of a test."""
_NUM_SHARDS, _MOST_S = 4, 900.0
_SLACK_BYTES = 16 << 20
"""That any process may hold beside its shard: counts in small runs alone."""
MOST_OF_SHARD, MOST_READ = 1.3, 1.02
"""Peak memory by what a rank keeps, and bytes read by those of its slices: bars of the issue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """One rank's load; `peak_bytes` beside what the process held before."""

    rank: int
    load_s: float
    read_s: float
    """Of a load before it, which read the same slices and kept none."""
    kept_bytes: int
    slice_bytes: int
    """As they lie in the files."""
    read_bytes: int
    peak_bytes: int


def main(argv: Sequence[str]) -> int:
    """Print a line a load; 1 where a rank reads or holds more than it may."""
    parser = CommandParser(prog="scripts/lab bench_load", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the files (default 2)")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--dtype", type=dtype, default="bfloat16")
    parser.add_argument("--pt", action="store_true", help="one .pt with two state dicts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary)")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        config = config_of(asked.gib)
        files = write(Path(folder), config, as_pt=asked.pt)
        num_bytes = sum(file.stat().st_size for file in files)
        good = True
        for number in range(asked.rounds):
            loads = load(Path(folder), tp=asked.tp, dtype=asked.dtype)
            good &= is_within(loads)
            print(_json(loads) if asked.json else _line(number, loads, num_bytes), flush=True)
        if not asked.json:
            print(f"a copy in memory: {copy_bytes_s() / 1e9:.1f} GB/s, one thread")
    return int(not good)


def config_of(gib: float) -> CausalWanConfig:
    """As many layers as make `gib` GiB in bfloat16, one at least."""
    heads, head_dim, ffn_dim = LARGE if gib >= 1 else SMALL

    def with_layers(num_layers: int) -> CausalWanConfig:
        return CausalWanConfig(
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=16,
            out_channels=16,
            text_dim=64,
            freq_dim=256,
            ffn_dim=ffn_dim,
            num_layers=num_layers,
        )

    one, two = (_num_bytes(with_layers(number)) for number in (1, 2))
    return with_layers(max(1, 1 + ceil((gib * 2**30 - one) / (two - one))))


def write(folder: Path, config: CausalWanConfig, *, as_pt: bool) -> list[Path]:
    """The files of a transformer with random weights, as diffusers or a trainer leaves them."""
    (folder / "config.json").write_text(config.to_json())
    weights = dict(_random_weights(config))
    if as_pt:
        torch.save({"generator": weights, "critic": {"w": torch.ones(8)}}, folder / "model.pt")
        return [folder / "model.pt"]
    names, files = list(weights), list[Path]()
    weight_map = dict[str, str]()
    for shard in range(_NUM_SHARDS):
        file = f"diffusion_pytorch_model-{shard + 1:05}-of-{_NUM_SHARDS:05}.safetensors"
        part = {name: weights[name] for name in names[shard::_NUM_SHARDS]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
        files.append(folder / file)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def load(folder: Path, *, tp: int, dtype: str) -> list[RankLoad]:
    """Load on `tp` ranks at once.

    Raises:
        ScopeError: a rank failed or took too long.
        FingerprintError: their slices are not the weights of the files.
    """
    command = [sys.executable, "-m", RANK_MODULE, str(folder), str(tp), dtype]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for rank in range(tp)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            rank.stdout.readline()  # it has imported all it needs
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(b"go\n")
            rank.stdin.flush()
        until_s = time.monotonic() + _MOST_S
        said = [_said(rank, until_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    whole = added_up({number: each["stored"] for number, each in enumerate(said)}, is_sharded)
    check_loaded({number: each["stored"] for number, each in enumerate(said)}, whole, is_sharded)
    used = added_up({number: each["used"] for number, each in enumerate(said)}, is_sharded)
    check_loaded({number: each["held"] for number, each in enumerate(said)}, used, is_sharded)
    return [RankLoad(**each["load"]) for each in said]


def is_within(loads: Sequence[RankLoad]) -> bool:
    """Whether no rank held more than it may, and each read its slices once."""
    read = all(load.read_bytes <= MOST_READ * load.slice_bytes for load in loads)
    most = (MOST_OF_SHARD * load.kept_bytes + _SLACK_BYTES for load in loads)
    held = all(load.peak_bytes <= each for load, each in zip(loads, most, strict=True))
    return read and held


def copy_bytes_s(num_bytes: int = 1 << 28) -> float:
    """What one thread copies from memory to memory a second."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes).byte()
    target.copy_(source)
    start_s = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    return 4 * num_bytes / (time.perf_counter() - start_s)


def _said(rank: subprocess.Popen[bytes], until_s: float) -> dict[str, Mapping[str, int]]:
    try:
        out, _ = rank.communicate(timeout=max(1.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise ScopeError(f"no load within {_MOST_S:g} s; ask for fewer --gib") from error
    if rank.returncode:
        raise ScopeError("a rank failed as said above")
    said: dict[str, Mapping[str, int]] = json.loads(out)
    return said


def _num_bytes(config: CausalWanConfig) -> int:
    with torch.device("meta"):
        return sum(2 * weight.numel() for weight in CausalWanModel(config).parameters())


def _random_weights(config: CausalWanConfig) -> Iterator[tuple[str, Tensor]]:
    """In bfloat16; all of one random block, each from a place of its own."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in CausalWanModel(config).named_parameters()}
    most = max(map(prod, shapes.values()))
    block = torch.randn(most + len(shapes), generator=torch.Generator().manual_seed(0)).bfloat16()
    for place, (name, shape) in enumerate(shapes.items()):
        assert diffusers_name(name) == name
        yield name, block[place : place + prod(shape)].view(shape).clone()


def _json(loads: Sequence[RankLoad]) -> str:
    return json.dumps([asdict(load) for load in loads])


def _line(number: int, loads: Sequence[RankLoad], num_bytes: int) -> str:
    load_s, read_s = max(load.load_s for load in loads), max(load.read_s for load in loads)
    read, slices = sum(load.read_bytes for load in loads), sum(load.slice_bytes for load in loads)
    peak = max(load.peak_bytes / load.kept_bytes for load in loads)
    kept = max(load.kept_bytes for load in loads)
    return (
        f"load {number}: {num_bytes / 2**30:.2f} GiB of files on {len(loads)} ranks in "
        f"{load_s:.2f} s, {slices / load_s / 1e9:.2f} GB/s together ({read_s:.2f} s, "
        f"{slices / read_s / 1e9:.2f} GB/s, to read alone); {read / slices:.3f} of the bytes of "
        f"their slices read; a rank keeps {kept / 2**30:.2f} GiB, its peak is {peak:.3f} of that"
    )
