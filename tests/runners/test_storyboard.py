from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from scope_rt.session import ScheduledEvent
from scope_runners import storyboard
from scope_runners.job import Timeline
from scope_runners.storyboard import Storyboard
from scope_runners.summary import ChunkRecord


def chunk(index: int, *, epoch: int, prompt: str) -> ChunkRecord:
    return ChunkRecord(
        chunk_index=index,
        cache_epoch=epoch,
        prompt=prompt,
        latents_sha256="",
        frames=12,
        generator_calls=5,
        recomputed=False,
        kv_cache_attention_bias=1.0,
        stage_ms={},
    )


def test_a_long_stream_keeps_its_ends_its_changes_and_few_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    event = ScheduledEvent(chunk_index=501, prompt="b", hard_cut=True)
    timeline = Timeline(num_chunks=1000, frames_per_chunk=12, events=(event,), ignored=())
    board = Storyboard(timeline, fps=16)
    for index in range(1000):
        late = index >= 501
        picture = np.zeros((16, 16, 3), np.uint8) if board.keeps(index) else None
        board.add(chunk(index, epoch=int(late), prompt="b" if late else "a"), picture)
    drawn: list[str] = []

    def draw(frames: list[NDArray[np.uint8]], labels: list[str], path: Path) -> None:
        drawn.extend(labels)

    monkeypatch.setattr(storyboard, "write_contact_sheet", draw)
    board.write(tmp_path / "sheet.png")
    assert len(drawn) == 25
    assert drawn[0] == "0.4s e0 prompt 1"
    assert "376.1s e1 cut prompt 2" in drawn
    assert drawn[-1] == "749.6s e1"
