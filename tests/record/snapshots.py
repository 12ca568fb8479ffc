"""A state as a stream saves it, and a folder with its snapshot; not a test itself."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from scope_rt.record.snapshot import SnapshotStore
from scope_rt.record.snapshot_header import SnapshotHeader

HEADER = SnapshotHeader(
    run_id="run", identity=(("seed", "7"),), log="a.scope", log_offset=99, next_chunk_index=4
)


class Method(StrEnum):
    LERP = "lerp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    prompt: str
    embeds: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    text: Text | None
    method: Method | None = None
    pending: tuple[Tensor, ...] = ()
    times: tuple[tuple[str, float], ...] = ()


def embeds() -> Tensor:
    """As a text encoder pads them: most of it zeros."""
    return torch.cat([torch.ones(1, 3, 64), torch.zeros(1, 509, 64)], dim=1)


STATE = State(
    text=Text(prompt="a red circle, " * 1000, embeds=embeds()),
    method=Method.LERP,
    pending=(torch.arange(6, dtype=torch.bfloat16).reshape(1, 2, 3), torch.tensor(5)),
    times=(("plan", 0.25),) * 300,
)


def saved(folder: Path, state: State = STATE) -> SnapshotStore:
    store = SnapshotStore(folder)
    store.save(HEADER, state)
    return store


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
